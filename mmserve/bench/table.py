"""Tables for people and JSON for programs."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def markdown(rows: Sequence[Row]) -> str:
    """The rows, which have the same keys, as a table with one column a key."""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What figures depend on, to stand beside them."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"machine": machine(), **report}, indent=1, ensure_ascii=False) + "\n")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.2f}"
    return str(value)
