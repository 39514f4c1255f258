"""The processes of a server and the memory they take, as Linux tells it."""

import os
import re
from itertools import pairwise
from pathlib import Path

PROC = Path("/proc")


def family(pid: int) -> list[int]:
    """``pid`` and all that descend from it; empty when it does not run."""
    children: dict[int, list[int]] = {}
    for name in PROC.iterdir():
        parent = _parent(name) if name.name.isdigit() else None
        if parent is not None:
            children.setdefault(parent, []).append(int(name.name))
    found = [pid] if _parent(PROC / str(pid)) is not None else []
    for member in found:  # it grows as they are found
        found += sorted(children.get(member, ()))
    return found


def title(pid: int) -> str:
    """What a process is: the module that Python runs, else the program's name; empty if it is gone."""
    try:
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        name = (PROC / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""
    named = [after for before, after in pairwise(words) if before == "-m"]
    return named[0] if named else name


def private_mib(pid: int) -> float | None:
    """Resident memory of the process's own, in MiB; what it shares is not counted. None if it is gone."""
    return _status(pid, "RssAnon")


def peak_mib(pid: int) -> float:
    """The sum of the peaks of all in the family of ``pid``, in MiB. What they share counts in each."""
    return sum(_status(member, "VmHWM") or 0.0 for member in family(pid))


def cpu_seconds(pid: int) -> float:
    """Time that all in the family of ``pid`` have computed so far, those that have ended apart."""
    return sum(_ticks(member) for member in family(pid)) / os.sysconf("SC_CLK_TCK")


def _ticks(pid: int) -> int:
    try:
        fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])  # utime, stime


def _status(pid: int, name: str) -> float | None:
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else None  # a process that has ended but was not reaped has none


def _parent(folder: Path) -> int | None:
    """The parent of a process that runs."""
    try:
        state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)
