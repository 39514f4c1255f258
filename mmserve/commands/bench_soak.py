"""``mmserve bench soak``: mixed traffic for a long time; passes or fails."""

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from mmserve.commands.bench_options import add_json, amount, count, count_or_none
from mmserve.core.config import add_arguments, options
from mmserve.core.errors import ConfigError

# Of a server of our own: caches so small that they evict, pages so few that requests give way, and arithmetic
# in which neighbours in a batch cannot tip a greedy choice.
SMALL = {
    "dtype": "float32",
    "kv_cache_mib": 3,
    "encoder_cache_mib": 1,
    "pixel_cache_mib": 1,
    "early_answers_mib": 1,
    "response_store_mib": 4,
    "max_running": 16,
    "drain_s": 5,
}
SECTIONS = ("model", "cache", "scheduler", "runner", "media", "server")


def add(benches: Any) -> None:
    parser = benches.add_parser(
        "soak", help="mixed traffic for a long time: faults, what is left behind, memory; passes or fails"
    )
    parser.add_argument("--minutes", type=amount, default=30.0, help="of traffic (default: 30)")
    parser.add_argument("--concurrency", type=count, default=16, metavar="N", help="callers (default: 16)")
    parser.add_argument("--seed", type=count_or_none, default=0, help="of the traffic (default: 0)")
    parser.add_argument(
        "--base-url", metavar="URL", help="of an mmserve that runs; one of its own, on tiny-vl, if not given"
    )
    parser.add_argument("--pid", type=int, metavar="PID", help="of the server at --base-url, for its memory")
    parser.add_argument(
        "--allow-overload", action="store_true", help="503 for want of room is counted, and no fault"
    )
    parser.add_argument(
        "--equality",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers about known pictures must stay the same, as they do in float32",
    )
    add_json(parser)
    small = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items())
    parser.epilog = f"A server of its own has any options of serve that are given, and else {small}."
    add_arguments(parser, *SECTIONS, skip=("port", "host", "api_key"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from mmserve.bench.own_server import own_server
    from mmserve.bench.soak import Plan, soak

    given = _given(args)
    if args.base_url and given:
        name = next(iter(given))
        raise ConfigError(f"{name} is for a server of its own, but --base-url names one", param=name)
    if args.pid and not args.base_url:
        raise ConfigError("pid is of the server at --base-url, which is not given", param="pid")
    plan = Plan(60 * args.minutes, args.concurrency, args.seed, args.allow_overload, args.equality)
    with contextlib.ExitStack() as stack:
        url, pid, own = args.base_url, args.pid, None
        if url is None:
            own = stack.enter_context(own_server({**SMALL, **given}))
            url, pid = own.base_url, own.pid
        report = asyncio.run(soak(url.rstrip("/").removesuffix("/v1"), pid, plan, _tell))
        report.log_faults = None if own is None else own.faults()
        return _show(args, plan, report)


def _show(args: argparse.Namespace, plan: Any, report: Any) -> int:
    from mmserve.bench.soak import passed
    from mmserve.bench.table import machine, markdown, write_json

    checks, memory = report.checks(plan), report.memory.table()
    print(f"{machine()['cpu']}, {machine()['date']}; {report.seconds:.0f} s, {plan.concurrency} callers\n")
    print(markdown(report.table()) + "\n")
    print("Meanwhile: " + ", ".join(f"{name} {value:.0f}" for name, value in report.did.items()) + "\n")
    if memory:
        print("Private memory of each process, medians of the first and the last third:\n")
        print(markdown(memory) + "\n")
    print(markdown(checks))
    if args.json:
        faults = {kind: count.told for kind, count in report.counts.items()}
        rows = {
            "kinds": report.table(),
            "memory": memory,
            "checks": checks,
            "did": report.did,
            "faults": faults,
        }
        write_json(args.json, {"bench": "soak", "plan": vars(plan), "seconds": report.seconds, **rows})
    return 0 if passed(checks) else 1


def _given(args: argparse.Namespace) -> dict[str, Any]:
    known = {field.name for _, field in options()}
    return {name: value for name, value in vars(args).items() if name in known}


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
