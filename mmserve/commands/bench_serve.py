"""``mmserve bench serve``: a load on running servers, this one's or others'."""

import argparse
import asyncio
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from mmserve.commands.bench_options import add_json, amount, count, count_or_none, size
from mmserve.core.errors import ConfigError

BESIDE = "images-beside-a-stream"
SCENARIOS = ("single", "text", "c8", "c8same", "c8warm", BESIDE)

# Options that shape a load of one's own, with their defaults; a preset brings its own.
OWN: dict[str, Any] = {"concurrency": 1, "request_rate": None, "requests": None, "images": "distinct"}


def add(benches: Any) -> None:
    parser = benches.add_parser(
        "serve", help="load on OpenAI-compatible servers: latencies, rates, side by side"
    )
    _add_servers(parser)
    _add_load(parser)
    _add_requests(parser)
    _add_run(parser)
    parser.set_defaults(run=run)


def _add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url",
        action="append",
        required=True,
        metavar="[NAME=]URL",
        help="of a server, without /v1; give it again for others, measured in turn",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help="each server's, in their order; its first if not given",
    )
    parser.add_argument(
        "--pid",
        action="append",
        type=int,
        metavar="PID",
        help="each server's process, for its peak memory (Linux)",
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scenario", metavar="NAMES", help=f"presets, separated by commas, or all: {', '.join(SCENARIOS)}"
    )
    parser.add_argument(
        "--concurrency", type=count, metavar="N", help="requests under way at once (default: 1)"
    )
    parser.add_argument(
        "--request-rate",
        type=amount,
        metavar="R",
        help="a second, at random moments (Poisson); default: none",
    )
    parser.add_argument("--requests", type=count, metavar="N", help="in all (default: as many as at once)")
    parser.add_argument(
        "--images", choices=("distinct", "same", "none"), help="of the requests (default: distinct)"
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images-per-request", type=count, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--size", type=size, default=(512, 512), metavar="WxH", help="(default: 512x512)")
    parser.add_argument("--image-format", choices=("PNG", "JPEG", "WEBP"), default="PNG")
    parser.add_argument(
        "--clip-seconds", type=count_or_none, default=0, metavar="S", help="a clip too (default: 0, none)"
    )
    parser.add_argument(
        "--text-words", type=count, default=32, metavar="N", help="about a token each (default: 32)"
    )
    parser.add_argument(
        "--max-tokens", type=count, default=64, metavar="N", help="of an answer (default: 64)"
    )
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help="answers of full length"
    )
    parser.add_argument(
        "--stream-tokens",
        type=count,
        default=2048,
        metavar="N",
        help="of the stream that pictures disturb; it must last longer than they take (default: 2048)",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=count, default=3, help="medians are over so many (default: 3)")
    parser.add_argument(
        "--warmup", type=count_or_none, default=1, metavar="N", help="requests before (default: 1)"
    )
    parser.add_argument("--ttft-ms", type=amount, metavar="MS", help="goodput: first words within")
    parser.add_argument("--itl-ms", type=amount, metavar="MS", help="goodput: 99 of 100 gaps within")
    parser.add_argument(
        "--seed",
        type=count_or_none,
        help="of pictures and words; the clock if not given, so that no cache knows them",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from mmserve.bench import serve
    from mmserve.bench.table import write_json

    servers, plan = servers_of(args), plan_of(args)
    rows = asyncio.run(serve.measure(servers, plan, lambda line: print(line, file=sys.stderr, flush=True)))
    memory = serve.memory_table(servers)
    _show(rows, plan, memory)
    if args.json:
        report = {"bench": "serve", "seed": plan.seed, "rows": rows, "memory": memory}
        write_json(args.json, report | {"shape": vars(plan.shape)})
    failed = any(
        row["errors"] for by_server in rows.values() for rounds in by_server.values() for row in rounds
    )
    return 1 if failed else 0


def _show(rows: Any, plan: Any, memory: Any) -> None:
    from mmserve.bench import serve
    from mmserve.bench.table import machine, markdown

    shape = plan.shape
    print(
        f"{machine()['cpu']}, {machine()['cores']} cores, {machine()['date']}; medians of {plan.rounds};"
        f" {shape.width}x{shape.height} {shape.image_format}, {shape.text_words} words,"
        f" {shape.max_tokens} tokens to answer\n"
    )
    if plan.loads:
        print(markdown(serve.table(rows, list(plan.loads), plan.goal)) + "\n")
    if plan.beside:
        print(f"A stream, while {serve.PICTURES} new pictures arrive:\n")
        print(markdown(serve.beside_table(rows)) + "\n")
    if memory:
        print(markdown(memory))


def servers_of(args: argparse.Namespace) -> list[Any]:
    """The servers to compare; ConfigError where lists do not fit together."""
    from mmserve.bench.processes import PROC, family
    from mmserve.bench.serve import Server

    named = [_name_and_url(text) for text in args.base_url]
    if len({name for name, _ in named}) < len(named):
        raise ConfigError("two servers have the same name; give NAME=URL", param="base_url")
    models, pids = args.model or [""] * len(named), args.pid or [None] * len(named)
    for name, values in (("model", models), ("pid", pids)):
        if len(values) != len(named):
            raise ConfigError(f"{len(named)} servers, but {len(values)} times --{name}", param=name)
    if args.pid and not PROC.is_dir():
        raise ConfigError("--pid reads /proc, which this system lacks", param="pid")
    gone = [pid for pid in args.pid or () if not family(pid)]
    if gone:
        raise ConfigError(f"no process {gone[0]} runs", param="pid")
    return [Server(*pair, pid, model) for pair, pid, model in zip(named, pids, models, strict=True)]


def plan_of(args: argparse.Namespace) -> Any:
    """What is to be measured; ConfigError for options that contradict each other."""
    from mmserve.bench.serve import Plan
    from mmserve.bench.summary import Goal
    from mmserve.bench.workload import Workload

    shape = Workload(
        images="distinct",
        images_per_request=args.images_per_request,
        width=args.size[0],
        height=args.size[1],
        image_format=args.image_format,
        clip_seconds=args.clip_seconds,
        text_words=args.text_words,
        max_tokens=args.max_tokens,
        ignore_eos=args.ignore_eos,
    )
    loads = _presets(args, shape) if args.scenario else _own(args, shape)
    return Plan(
        shape=shape,
        loads={name: load for name, load in loads.items() if name != BESIDE},
        beside=BESIDE in loads,
        rounds=args.rounds,
        warmup=args.warmup,
        stream_tokens=args.stream_tokens,
        seed=time.time_ns() // 10**7 if args.seed is None else args.seed,
        goal=Goal(args.ttft_ms, args.itl_ms),
    )


def _presets(args: argparse.Namespace, shape: Any) -> dict[str, Any]:
    from mmserve.bench.load import scenarios

    given = [name for name in OWN if getattr(args, name) is not None]
    if given:
        raise ConfigError(f"--scenario has its own {given[0]}; give one of the two", param=given[0])
    wanted = SCENARIOS if args.scenario == "all" else args.scenario.split(",")
    unknown = [name for name in wanted if name not in SCENARIOS]
    if unknown:
        raise ConfigError(f"unknown scenario {unknown[0]!r}; known: {', '.join(SCENARIOS)}", param="scenario")
    known = {**scenarios(shape), BESIDE: None}
    return {name: known[name] for name in SCENARIOS if name in wanted}


def _own(args: argparse.Namespace, shape: Any) -> dict[str, Any]:
    from dataclasses import replace

    from mmserve.bench.load import Load

    own = {
        name: default if getattr(args, name) is None else getattr(args, name) for name, default in OWN.items()
    }
    unbound = own["request_rate"] is not None and args.concurrency is None
    count = own["requests"] or own["concurrency"]
    workload = replace(shape, images=own["images"])
    return {"load": Load(workload, count, None if unbound else own["concurrency"], own["request_rate"])}


def _name_and_url(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    if not found or "/" in name:
        name, url = urlsplit(text).netloc, text
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"must be an http(s) URL, not {url!r}", param="base_url")
    return name, url.rstrip("/").removesuffix("/v1")
