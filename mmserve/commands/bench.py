"""``mmserve bench``: measured figures, as tables and as JSON."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from mmserve.commands import bench_gpu, bench_live, bench_offline, bench_serve, bench_simulate, bench_soak
from mmserve.core.config import BUNDLED_MODEL
from mmserve.core.errors import ConfigError


def add(commands: Any) -> None:
    parser = commands.add_parser("bench", help="measure parts of mmserve and print tables")
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    _add_preprocess(benches)
    _add_scheduler(benches)
    bench_serve.add(benches)
    bench_offline.add(benches)
    bench_gpu.add(benches)
    bench_soak.add(benches)
    bench_live.add(benches)
    bench_simulate.add(benches)


def _add_preprocess(benches: Any) -> None:
    parser = benches.add_parser(
        "preprocess", help="pictures and frames a second, by workers, size and format"
    )
    parser.add_argument("--model", default=BUNDLED_MODEL, help="whose processor runs (default: tiny-vl's)")
    parser.add_argument("--workers", type=_counts, default=(1, 2), help="pool sizes (default: 1,2)")
    parser.add_argument(
        "--max-pixels",
        type=int,
        default=1 << 24,
        help="of a picture after the resize (default: 16,777,216, as Qwen3-VL has it)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="medians are over so many (default: 5)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only samples whose name holds it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(run=_preprocess)


def _preprocess(args: argparse.Namespace) -> int:
    from mmserve.bench import preprocess
    from mmserve.bench.table import machine, markdown, write_json
    from mmserve.models.hub import resolve
    from mmserve.preprocess.spec import ProcessorSpec

    spec = preprocess.budgeted(ProcessorSpec.load(resolve(args.model)), args.max_pixels)
    chosen = [s for s in preprocess.samples() if args.only.lower() in s.name.lower()]
    if not chosen:
        raise ConfigError(f"no sample's name holds {args.only!r}", param="only")
    rows = asyncio.run(preprocess.measure(spec, args.workers, args.rounds, chosen))
    rows = [preprocess.with_ratios(row, args.workers) for row in rows]
    print(f"{machine()['cpu']}, {machine()['cores']} cores; pictures or frames of the file a second,")
    print(f"medians of {args.rounds}; at most {args.max_pixels} pixels after the resize\n")
    print(markdown(rows))
    if args.json:
        write_json(args.json, {"bench": "preprocess", "max_pixels": args.max_pixels, "rows": rows})
    return 0


def _add_scheduler(benches: Any) -> None:
    parser = benches.add_parser("scheduler", help="what a step costs the host, by running requests")
    parser.add_argument(
        "--running", type=_counts, default=(1, 64, 256, 1024), help="requests that decode (1,64,256,1024)"
    )
    parser.add_argument("--steps", type=int, default=200, help="medians are over so many (default: 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.set_defaults(run=_scheduler)


def _scheduler(args: argparse.Namespace) -> int:
    from mmserve.bench import scheduler
    from mmserve.bench.table import machine, markdown, write_json

    rows = [scheduler.measure(running, args.steps) for running in args.running]
    print(f"{machine()['cpu']}; microseconds a step in which all requests decode, medians of {args.steps}\n")
    print(markdown(rows))
    if args.json:
        write_json(args.json, {"bench": "scheduler", "rows": rows})
    return 0


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"must be whole numbers like 1,2, not {text!r}")
    return counts
