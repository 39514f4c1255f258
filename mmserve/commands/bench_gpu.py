"""``mmserve bench gpu``: models of published shapes on this device, as shares of what it can do at most."""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from mmserve.commands.bench_offline import given_options, quiet
from mmserve.commands.bench_options import add_json, amount
from mmserve.core.config import add_arguments, from_arguments
from mmserve.core.errors import ConfigError

# What the plan of measurements sets.
OURS = ("model", "revision", "load_format", "dtype", "max_running", "step_tokens", "max_model_len")


def add(benches: Any) -> None:
    parser = benches.add_parser(
        "gpu", help="decode, prefill, encoder, graphs and image load, beside the GPU's rates and transformers"
    )
    parser.add_argument(
        "--shapes",
        default="qwen3-vl-2b,qwen3-vl-8b",
        metavar="NAME,NAME",
        help="models of random weights: qwen3-vl-2b, qwen3-vl-8b, tiny (default: the first two)",
    )
    parser.add_argument(
        "--budget",
        type=amount,
        default=300.0,
        metavar="S",
        help="seconds; what they leave no time for is left out",
    )
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="measure transformers, too"
    )
    parser.add_argument("--trial", action="store_true", help="everything once and small: a test, no figures")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    add_json(parser)
    add_arguments(parser, "model", "cache", "scheduler", "runner", skip=OURS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    quiet()
    from mmserve.bench import gpu, gpu_rates
    from mmserve.bench.figures import Budget, Ledger
    from mmserve.bench.gpu_report import Report

    shapes, device = _shapes(args.shapes), _device(from_arguments(args).model.device)
    plan, options = gpu.TRIAL if args.trial else gpu.Plan(), given_options(args)
    rates = gpu_rates.measure(device, small=args.trial)
    report = Report(device, rates, {"shapes": shapes, **options}, args.json, args.markdown, args.trial)
    ledger = Ledger(Budget(args.budget), report.keep)
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes:
            _tell(f"{shape}, {ledger.budget.left:.0f} s left")
            place = Path(folder) / shape
            gpu.measure_shape(shape, place, plan, options, rates, ledger, report.backends)
            gpu.release(device)
        for shape in shapes if args.peers else ():
            _tell(f"transformers as {shape}, {ledger.budget.left:.0f} s left")
            gpu.compare(shape, Path(folder) / shape, plan, device, ledger)
            gpu.release(device)
    print(report.text(ledger.figures))
    return 0


def _shapes(text: str) -> list[str]:
    from mmserve.bench.shapes import SHAPES

    named = text.split(",")
    unknown = [name for name in named if name not in SHAPES]
    if unknown:
        raise ConfigError(f"unknown shape {unknown[0]!r}; known: {', '.join(SHAPES)}", param="shapes")
    return named


def _device(wanted: str) -> Any:
    import torch

    if wanted != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no NVIDIA GPU; --device cpu --trial tries everything out", param="device"
        )
    return torch.device("cpu" if wanted == "cpu" else "cuda")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
