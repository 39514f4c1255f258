"""``mmserve bench simulate``: the real scheduler under traffic, on hardware that is arithmetic."""

import argparse
from pathlib import Path
from typing import Any

from mmserve.bench.paper import HARDWARE, SHAPES
from mmserve.commands.bench_options import add_json, amount, count, count_or_none, counts
from mmserve.core.config import add_arguments, from_arguments
from mmserve.core.errors import ConfigError

INVENTED = ("cameras", "chats")


def add(benches: Any) -> None:
    parser = benches.add_parser(
        "simulate", help="the scheduler under up to thousands of cameras or chats, on hardware of data sheets"
    )
    parser.add_argument(
        "--traffic",
        default="cameras",
        metavar="KIND",
        help="cameras, chats, or a file of recorded requests, one JSON object a line (default: cameras)",
    )
    parser.add_argument(
        "--load",
        type=counts,
        default=(1, 10, 100, 1000, 10000),
        help="cameras, or chats a second; a row for each (default: 1,10,100,1000,10000)",
    )
    parser.add_argument("--hardware", choices=HARDWARE, default="h100", help="(default: h100)")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-vl-7b", help="(default: qwen2.5-vl-7b)")
    parser.add_argument(
        "--attained", type=amount, default=1.0, help="share of the data sheet that is reached (default: 1)"
    )
    parser.add_argument("--seconds", type=amount, default=20.0, help="of traffic (default: 20)")
    parser.add_argument("--seed", type=count_or_none, default=0, help="of the traffic (default: 0)")
    parser.add_argument("--deadline-ms", type=count, help="of every invented request; none if not given")
    cameras = parser.add_argument_group("cameras")
    cameras.add_argument("--fps", type=amount, default=1.0, help="frames a second (default: 1)")
    cameras.add_argument("--every", type=amount, default=10.0, help="seconds between questions (default: 10)")
    cameras.add_argument("--window", type=count, default=4, help="frames asked about (default: 4)")
    cameras.add_argument("--frame-tokens", type=count, default=64, help="of one frame (default: 64)")
    add_json(parser)
    add_arguments(parser, "scheduler")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mmserve.bench.paper import Costs
    from mmserve.bench.simulate import Simulation
    from mmserve.bench.table import markdown, write_json

    options = from_arguments(args).scheduler
    hardware = HARDWARE[args.hardware]
    costs = Costs(hardware, SHAPES[args.shape], args.attained)
    rows = []
    for load in args.load if args.traffic in INVENTED else (None,):
        named = {} if load is None else {args.traffic: load}
        rows.append({**named, **Simulation(_arrivals(args, load), costs, options).run()})
    print(f"{args.shape} on {args.hardware} as its data sheet has it ({hardware.source}),")
    print(
        f"{args.attained:g} of which attained; {args.seconds:g} s of traffic, seed {args.seed}; nothing but"
    )
    print("the host's µs is measured; times in ms\n")
    print(markdown(rows))
    if args.json:
        asked = {name: getattr(args, name) for name in ("traffic", "hardware", "shape", "attained", "seed")}
        write_json(args.json, {"bench": "simulate", **asked, "seconds": args.seconds, "rows": rows})
    return 0


def _arrivals(args: argparse.Namespace, load: int | None) -> Any:
    from mmserve.bench import arrivals

    if args.traffic == "chats" and load is not None:
        return arrivals.chats(load, args.seconds, args.seed, args.deadline_ms)
    if args.traffic == "cameras" and load is not None:
        return arrivals.cameras(
            load,
            args.seconds,
            args.seed,
            fps=args.fps,
            every=args.every,
            window=args.window,
            frame_tokens=args.frame_tokens,
            deadline_ms=args.deadline_ms,
        )
    if not Path(args.traffic).is_file():
        raise ConfigError(f"traffic must be cameras, chats or a file, not {args.traffic!r}", param="traffic")
    return arrivals.recorded(Path(args.traffic))
