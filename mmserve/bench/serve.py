"""Servers measured side by side: round by round each scenario meets all of them in turn, with equal requests,
so that they meet the same noise. Figures are medians over the rounds, ratios medians of the rounds' own."""

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx

from mmserve.bench.client import first_model
from mmserve.bench.load import Disturbed, Load, Run, beside_a_stream
from mmserve.bench.processes import family, peak_mib
from mmserve.bench.summary import Goal, medians, percentile, ratio, summary
from mmserve.bench.workload import Workload
from mmserve.core.errors import ConfigError

BESIDE = "images-beside-a-stream"
SAME, WARM = "c8same", "c8warm"
ANY = Goal()
PICTURES = 8  # that arrive beside a stream
COMPARED = ("TTFT p50 ms", "TPOT mean ms", "output tok/s")  # with the first server
SHOWN = (
    *("TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms", "TPOT mean ms", "e2e p50 ms"),
    *("output tok/s", "requests/s", "cached tokens"),
)


@dataclass(frozen=True)
class Server:
    """One of those that are compared. ``pid`` is the root of its processes, where its memory is asked for."""

    name: str
    base_url: str
    pid: int | None = None
    model: str = ""

    @property
    def chats(self) -> str:
        return f"{self.base_url}/v1/chat/completions"


@dataclass(frozen=True)
class Plan:
    """What is measured: each of ``loads``, and ``beside`` if that is wanted."""

    shape: Workload
    loads: Mapping[str, Load]
    beside: bool = False
    rounds: int = 3
    warmup: int = 1
    stream_tokens: int = 2048
    seed: int = 0
    goal: Goal = ANY

    def seed_of(self, scenario: str, round_number: int) -> int:
        """Every scenario of every round has its own pictures, but for the one that must find all caches
        warm."""
        names = (*self.loads, BESIDE, "warm-up")
        kept = SAME if scenario == WARM else scenario
        place = names.index(kept) if kept in names else len(names)
        return self.seed * 100_003 + round_number * 101 + place


Rows = dict[str, dict[str, list[dict[str, Any]]]]  # scenario -> server -> one row a round


async def measure(servers: Sequence[Server], plan: Plan, told: Callable[[str], None] = print) -> Rows:
    """All rows; ``told`` hears of each as it is measured. ConfigError for a server that does not answer."""
    rows: Rows = {}
    async with _client() as client:
        servers = [await _named(client, server) for server in servers]
        for server in servers:
            await _warm_up(client, server, plan)
        for number in range(plan.rounds):
            for scenario in (*plan.loads, *((BESIDE,) if plan.beside else ())):
                for server in servers:
                    row = await _row(client, server, plan, scenario, number)
                    rows.setdefault(scenario, {}).setdefault(server.name, []).append(row)
                    told(f"round {number + 1} of {plan.rounds}: {scenario}, {server.name}")
    return rows


async def _row(
    client: httpx.AsyncClient, server: Server, plan: Plan, scenario: str, number: int
) -> dict[str, Any]:
    seed = plan.seed_of(scenario, number)
    if scenario == BESIDE:
        return beside_row(await _beside(client, server, plan, seed))
    load = plan.loads[scenario]
    bodies = load.workload.bodies(server.model, load.requests, seed)
    if scenario == WARM and SAME not in plan.loads:
        await load.send(client, server.chats, bodies, seed)
    return summary(await load.send(client, server.chats, bodies, seed), plan.goal)


async def _beside(client: httpx.AsyncClient, server: Server, plan: Plan, seed: int) -> Disturbed:
    words = replace(plan.shape, images="none", clip_seconds=0)
    long = replace(words, max_tokens=plan.stream_tokens)
    pictures = replace(plan.shape, images="distinct").bodies(server.model, PICTURES, seed)
    bodies = (words.body(server.model, seed), long.body(server.model, seed))
    return await beside_a_stream(client, server.chats, *bodies, pictures)


def beside_row(disturbed: Disturbed) -> dict[str, Any]:
    """A stream's gaps in milliseconds, alone and under load, and how many times longer the worst are."""
    alone = percentile(disturbed.alone.gaps, 50)
    under = {point: percentile(disturbed.gaps, point) for point in (50, 99, 100)}
    pictures = summary(disturbed.pictures, ANY)
    return {
        "ITL p50 alone ms": _ms(alone),
        "ITL p50 ms": _ms(under[50]),
        "ITL p99 ms": _ms(under[99]),
        "ITL max ms": _ms(under[100]),
        "p99 / alone": under[99] / alone if alone and under[99] else None,
        "pictures' TTFT p50 ms": pictures["TTFT p50 ms"],
        "gaps": len(disturbed.gaps),
        "errors": pictures["errors"] if disturbed.covered else {"stream too short": 1} | pictures["errors"],
    }


def table(rows: Rows, scenarios: Sequence[str], goal: Goal) -> list[dict[str, Any]]:
    """One line for each scenario and server; all but the first server beside it."""
    goodput = ("goodput/s",) if goal != ANY else ()
    return [
        {"scenario": scenario, "server": name}
        | {key: line[key] for key in (*SHOWN, *goodput)}
        | {"errors": _told(line["errors"])}
        | _ratios(rounds, first, len(rows[scenario]))
        for scenario in scenarios
        for first in [next(iter(rows[scenario].values()))]
        for name, rounds in rows[scenario].items()
        for line in [medians(rounds)]
    ]


def beside_table(rows: Rows) -> list[dict[str, Any]]:
    lines = {name: medians(rounds) for name, rounds in rows[BESIDE].items()}
    return [{"server": name} | line | {"errors": _told(line["errors"])} for name, line in lines.items()]


def memory_table(servers: Sequence[Server]) -> list[dict[str, Any]]:
    """The peak memory so far of those whose process is known."""
    return [
        {"server": s.name, "processes": len(family(s.pid)), "peak RSS MiB": peak_mib(s.pid)}
        for s in servers
        if s.pid is not None
    ]


def _ratios(rounds: Sequence[Any], first: Sequence[Any], servers: int) -> dict[str, Any]:
    if servers == 1:
        return {}
    return {f"× {name}": ratio(rounds, first, name) for name in COMPARED}


def _told(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in errors.items()) or "0"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or math.isnan(seconds) else 1e3 * seconds


async def _named(client: httpx.AsyncClient, server: Server) -> Server:
    """The server with the model that it serves, if none was named."""
    try:
        return server if server.model else replace(server, model=await first_model(client, server.base_url))
    except (httpx.HTTPError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(
            f"{server.base_url} does not answer as expected: {reason}", param="base_url"
        ) from None


async def _warm_up(client: httpx.AsyncClient, server: Server, plan: Plan) -> None:
    bodies = plan.shape.bodies(server.model, plan.warmup, plan.seed_of("warm-up", 0))
    if bodies:
        run: Run = await Load(plan.shape, len(bodies), 1).send(client, server.chats, bodies, 0)
        failed = [t.error for t in run.traces if t.error]
        if failed:
            raise ConfigError(f"{server.base_url} refuses the warm-up: {failed[0]}", param="base_url")


@asynccontextmanager
async def _client() -> AsyncIterator[httpx.AsyncClient]:
    """No bound on connections, and time enough for a server that is slow."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(600, connect=30)) as client:
        yield client
