"""``mmserve doctor``: what this machine has, what will run on it and why, and every setting."""

import argparse
import asyncio
import json
import os
import platform
import time
from importlib import metadata
from typing import Any

from mmserve import __version__
from mmserve.commands import session
from mmserve.core.config import Config, add_arguments, from_arguments
from mmserve.core.env import SETTINGS
from mmserve.core.errors import ModelLoadError

PACKAGES = (
    *("torch", "safetensors", "tokenizers", "numpy", "pillow", "opencv-python-headless", "av"),
    *("fastapi", "uvicorn", "msgspec", "pyzmq", "transformers", "triton", "flashinfer-python"),
    *("llguidance", "xgrammar", "aiortc"),
)
CPU_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def add(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="show versions, devices, the backends that will run and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--load", action="store_true", help="also load the model and caption one picture")
    add_arguments(
        parser, "model", "runner", "media", "scheduler", "cache", "server", "live", "realtime", "cameras"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = from_arguments(args)
    session.quiet()
    report = examine(config)
    if args.load:
        report["load"] = load(config)
    print(json.dumps(report, indent=2) if args.json else pages(report))
    return 0


def examine(config: Config) -> dict[str, Any]:
    """Everything that can be told without loading the model."""
    from mmserve import backends

    return {
        "mmserve": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": cpu(),
        "gpu": gpus(),
        "model": model(config),
        "backends": backends.expected(config),
        "processes": processes(config),
        "config": config.flat(),
    }


def model(config: Config) -> dict[str, Any]:
    """What its folder says of the model, if it is on this machine."""
    from mmserve import backends

    try:
        found = backends.on_this_machine(config)
    except ModelLoadError as error:
        return {"name": config.model.model, "problem": error.message}
    if found is None:
        return {"name": config.model.model, "where": "on the hub, or in its cache"}
    text, vision = found.text, found.vision
    return {
        "name": config.model.model,
        "family": found.family,
        "text": f"{text.num_layers} layers of {text.hidden_size}, a vocabulary of {text.vocab_size}",
        "vision": f"{vision.depth} layers of {vision.hidden_size}, patches of {vision.patch_size}",
    }


def processes(config: Config) -> dict[str, Any]:
    """What ``mmserve serve`` runs where."""
    own, workers = config.server.engine_process, config.media.workers
    return {
        "api": "HTTP, limits, answers" if own else "HTTP, limits, engine, text of tokens",
        "engine": "the model" if own else "in the api (engine_process is off)",
        "detokenizer": "text of tokens" if own else "in the api (engine_process is off)",
        "workers": f"{workers} decode, 1 lays out prompts" if workers else "in the api",
        "cameras": "one for each that is pulled or comes by WebRTC",
        "webrtc": "aiortc" if _version("aiortc") else "not there: pip install 'mmserve[webrtc]' brings it",
    }


def cpu() -> dict[str, Any]:
    facts = _proc_cpuinfo()
    flags = facts.get("flags", "").split()
    return {
        "model": facts.get("model name", platform.processor() or platform.machine()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "flags": [flag for flag in CPU_FLAGS if flag in flags],
        "settings": {name: os.environ.get(name, "not set") for name in SETTINGS},
    }


def gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": c.name,
            "memory_gib": round(c.total_memory / 2**30, 1),
            "capability": f"{c.major}.{c.minor}",
        }
        for c in cards
    ]


def load(config: Config) -> dict[str, Any]:
    """Load the model, send the probe picture through it, and tell how long each took."""
    from mmserve.generation import whole
    from mmserve.server.health import probe
    from mmserve.service import Service

    start = time.monotonic()
    service = Service.load(config)
    loaded = time.monotonic()
    try:
        asyncio.run(whole(service, probe()))
        first = time.monotonic()
        return {
            "model": service.model_name,
            "load_s": round(loaded - start, 3),
            "first_picture_s": round(first - loaded, 3),
            "stats": service.stats(),
        }
    finally:
        service.close()


def pages(report: dict[str, Any], depth: int = 0) -> str:
    """The report as indented ``name: value`` lines."""
    indent, lines = "  " * depth, []
    for name, value in report.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", pages(value, depth + 1)]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{indent}{name}:", *(pages({str(i): v}, depth + 1) for i, v in enumerate(value))]
        else:
            lines.append(f"{indent}{name}: {_shown(value)}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list | tuple) else str(value)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _proc_cpuinfo() -> dict[str, str]:
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
