"""``mmserve bench live``: synthetic cameras against a server."""

import argparse
import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from mmserve.commands.bench_options import add_json, amount, count, count_or_none, counts, size
from mmserve.core.config import add_arguments, options
from mmserve.core.errors import ConfigError

if TYPE_CHECKING:
    from mmserve.bench.live_scene import Kind

SCENES: "dict[str, tuple[Kind, ...]]" = {
    "moving": ("moving",),
    "static": ("static",),
    "both": ("moving", "static"),
}
SECTIONS = ("model", "cache", "scheduler", "runner", "media", "live", "realtime", "server")


def add(benches: Any) -> None:
    parser = benches.add_parser(
        "live", help="synthetic cameras: how many are sustained, frame age, drops, what one more costs"
    )
    parser.add_argument(
        "--cameras", type=counts, default=(1, 2, 4), metavar="N[,N...]", help="at once (default: 1,2,4)"
    )
    parser.add_argument("--fps", type=amount, default=10.0, metavar="F", help="of each camera (default: 10)")
    parser.add_argument("--seconds", type=amount, default=20.0, metavar="S", help="of each run (default: 20)")
    parser.add_argument(
        "--scene",
        choices=tuple(SCENES),
        default="moving",
        help="what they show; both: first one, then the other (default: moving)",
    )
    parser.add_argument(
        "--idle",
        type=count_or_none,
        default=0,
        metavar="N",
        help="cameras beside them that show what stands still and are asked nothing (default: 0)",
    )
    parser.add_argument(
        "--idle-fps", type=amount, default=1.0, metavar="F", help="of each idle camera (default: 1)"
    )
    parser.add_argument("--size", type=size, default=(320, 240), metavar="WxH", help="(default: 320x240)")
    parser.add_argument(
        "--ask-every", type=amount, default=4.0, metavar="S", help="a question to each camera (default: 4)"
    )
    parser.add_argument(
        "--deadline-ms",
        type=amount,
        default=2000.0,
        metavar="MS",
        help="for a whole answer; the server gives it up then (default: 2000)",
    )
    parser.add_argument(
        "--max-tokens", type=count, default=16, metavar="N", help="of an answer (default: 16)"
    )
    parser.add_argument(
        "--policy", type=_policy, default={}, metavar="JSON", help='more of it, like {"fps": 1, "pair": true}'
    )
    parser.add_argument(
        "--window", type=count, default=8, metavar="N", help="frames to compare with re-sending (default: 8)"
    )
    parser.add_argument(
        "--rounds", type=count_or_none, default=3, help="of that comparison; 0 for none (default: 3)"
    )
    parser.add_argument("--seed", type=count_or_none, default=0, help="of the pictures (default: 0)")
    parser.add_argument(
        "--server", metavar="URL", help="an mmserve that runs; one of its own, on tiny-vl, if not given"
    )
    parser.add_argument(
        "--pid", type=int, metavar="PID", help="of the server at --server, for CPU and memory"
    )
    add_json(parser)
    parser.epilog = "A server of its own has any options of serve that are given."
    add_arguments(parser, *SECTIONS, skip=("port", "host"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mmserve.bench.own_server import own_server

    given = _given(args)
    named = [name for name in given if name != "api_key"]
    if args.server and named:
        raise ConfigError(f"{named[0]} is for a server of its own, but --server names one", param=named[0])
    if args.pid and not args.server:
        raise ConfigError("pid is of the server at --server, which is not given", param="pid")
    with contextlib.ExitStack() as stack:
        url, pid = args.server, args.pid
        if url is None:
            own = stack.enter_context(own_server(given))
            url, pid = own.base_url, own.pid
        return asyncio.run(_measure(args, url.rstrip("/").removesuffix("/v1"), pid))


async def _measure(args: argparse.Namespace, url: str, pid: int | None) -> int:
    from mmserve.bench.live import measure
    from mmserve.bench.live_camera import Plan
    from mmserve.bench.live_window import compare

    plan = Plan(
        fps=args.fps,
        seconds=args.seconds,
        size=args.size,
        ask_every=args.ask_every,
        deadline_ms=args.deadline_ms,
        max_tokens=args.max_tokens,
        policy=args.policy,
        seed=args.seed,
        idle=args.idle,
        idle_fps=args.idle_fps,
    )
    key = (getattr(args, "api_key", None) or "").partition(",")[0] or None
    runs = await measure(url, plan, SCENES[args.scene], args.cameras, _tell, pid=pid, api_key=key)
    window = await compare(url, plan, args.window, args.rounds, key) if args.rounds else []
    return _show(args, plan, runs, window)


def _show(args: argparse.Namespace, plan: Any, runs: list[Any], window: list[dict[str, Any]]) -> int:
    from mmserve.bench.live import growth, static_shares
    from mmserve.bench.table import machine, markdown, write_json

    rows = [run.row() for run in runs]
    frames, stages = [run.frames_row() for run in runs], [run.stages_row() for run in runs]
    memory, shares = [row for run in runs for row in run.memory_rows()], static_shares(rows)
    print(
        f"{machine()['cpu']}, {machine()['cores']} cores, {machine()['date']};"
        f" {plan.size[0]}x{plan.size[1]}, {plan.fps:g} frames a second and camera for {plan.seconds:g} s;"
        f" {plan.max_tokens} tokens to answer within {plan.deadline_ms:g} ms\n"
    )
    print(markdown(rows) + "\n")
    more = growth(rows)
    if more:
        print("One camera more costs " + ", ".join(f"{more[name]:.2f} {name}" for name in more) + ".\n")
    for number, share in shares.items():
        print(f"{number} cameras: what stands still has {100 * share:.2f} % of the encoder's items\n")
    print("What became of frames:\n\n" + markdown(frames) + "\n")
    print("Their mean age when they passed each stage:\n\n" + markdown(stages) + "\n")
    if memory:
        print("Memory of the server's processes:\n\n" + markdown(memory) + "\n")
    if window:
        print(f"First words about {args.window} frames, with nothing else to do:\n\n{markdown(window)}\n")
    faults = [run.faults for run in runs]
    for row, found in zip(rows, faults, strict=True):
        for kind, times in found.items():
            print(f"{row['cameras']} cameras, {row['scene']}: {times} × {kind}")
    if args.json:
        report = {"bench": "live", "plan": vars(plan), "rows": rows, "growth": more, "frames": frames}
        report |= {"stages": stages, "window": window, "faults": faults, "memory": memory}
        report["static_shares"] = shares
        write_json(args.json, report)
    return 0


def _policy(text: str) -> dict[str, Any]:
    try:
        policy = json.loads(text)
    except ValueError:
        policy = None
    if not isinstance(policy, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object like {{"fps": 1}}, not {text!r}')
    return policy


def _given(args: argparse.Namespace) -> dict[str, Any]:
    known = {field.name for _, field in options()}
    return {name: value for name, value in vars(args).items() if name in known}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
