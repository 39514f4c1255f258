"""What a soak looks at from outside: the memory of the server's processes, and the server's own figures."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mmserve.bench.processes import family, private_mib, title

GROWTH, SPARE_MIB = 0.10, 16.0  # what an allocator may take more without being a leak
SETTLING = 0.1  # the first part of a run, in which caches fill
DID = ("steps", "preemptions", "pixel_requests", "encoder_pool_evictions", "workers_recycled", "jobs_done")
LINE = re.compile(r"^(mmserve_\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)
NEVER = re.compile(r"^mmserve_\w*(lost|restart)\w*_total")  # counters that a sound server leaves alone
IDLE = ("requests_running", "requests_waiting", "requests_parked", "requests_preparing", "jobs_queued")


def figures(text: str) -> dict[str, float]:
    """The samples of a /metrics page, by name with labels."""
    return {name: float(value) for name, value in LINE.findall(text)}


def busy(now: Mapping[str, float]) -> dict[str, float]:
    """The gauges that are not at rest; pages that are neither free nor cached among them. A server that tells
    nothing is not known to be at rest."""
    if not now:
        return {"figures missing": 1.0}
    gauges = {name: now.get(f"mmserve_{name}", 0.0) for name in IDLE}
    pages = [now.get(f"mmserve_kv_pages{kind}", 0.0) for kind in ("", "_free", "_cached")]
    gauges["pages in use"] = pages[0] - pages[1] - pages[2]
    return {name: value for name, value in gauges.items() if value}


def never(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much the counters rose that must not rise."""
    rises = {name: after[name] - before.get(name, 0.0) for name in after if NEVER.match(name)}
    return {name: rise for name, rise in rises.items() if rise}


def did(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the server had to do meanwhile."""
    names = {name: f"mmserve_{name}_total" for name in DID}
    return {name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in names.items()}


@dataclass
class Memory:
    """Samples of the private memory, in MiB, of ``pid`` and all that descend from it."""

    pid: int | None
    samples: list[dict[int, float]] = field(default_factory=list)
    titles: dict[int, str] = field(default_factory=dict)

    def sample(self) -> None:
        if self.pid is None:
            return
        sizes = {pid: private_mib(pid) for pid in family(self.pid)}
        self.samples.append({pid: size for pid, size in sizes.items() if size is not None})
        for pid in self.samples[-1].keys() - self.titles.keys():
            self.titles[pid] = title(pid)

    def table(self) -> list[dict[str, Any]]:
        """One line for each process that was there from the first to the last third."""
        settled = self.samples[int(SETTLING * len(self.samples)) :]
        third = len(settled) // 3
        if not third:
            return []
        first, last = settled[:third], settled[-third:]
        stayed = [pid for pid in first[0] if all(pid in sizes for sizes in (*first, *last))]
        return [
            _line(self.titles[pid], pid, *(median(sizes[pid] for sizes in part) for part in (first, last)))
            for pid in stayed
        ]


def _line(name: str, pid: int, first: float, last: float) -> dict[str, Any]:
    grew = last > first * (1 + GROWTH) + SPARE_MIB
    growth = last - first
    return {
        "process": name,
        "pid": pid,
        "first third MiB": first,
        "last third MiB": last,
        "growth MiB": growth,
        "flat": not grew,
    }
