"""A question about a window of frames: watched ahead, against sending the window with the question."""

import asyncio
import json
import time
from contextlib import aclosing
from statistics import median
from typing import Any

import httpx

from mmserve.bench.client import chat, first_model
from mmserve.bench.live_camera import QUESTION, Plan
from mmserve.bench.live_scene import frames
from mmserve.bench.soak_watch import IDLE, figures
from mmserve.bench.workload import data_url
from mmserve.client import LiveClient
from mmserve.core.errors import MMServeError

SETTLE_S = 120.0  # for a frame to be kept and computed
REST_S = 0.02  # between two looks whether the server is at rest

Row = dict[str, Any]


async def compare(
    base_url: str, plan: Plan, window: int, rounds: int, api_key: str | None = None
) -> list[Row]:
    """Two rows, of medians over ``rounds``: the same question about ``window`` frames, asked in both ways in
    turn. All frames are new to the server, which has nothing else to do."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    ahead, sent = [], []
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=SETTLE_S) as web:
        model = await first_model(web, base_url)
        for number in range(-1, rounds):  # the first one is for the server to warm up
            seed = 1_000_003 * plan.seed + 500_009 + 4 * number
            pictures = frames("moving", plan.size, 2 * window, seed)
            ahead.append(await _watched(web, base_url, plan, pictures[:window], api_key))
            sent.append(await _sent(web, f"{base_url}/v1/chat/completions", model, plan, pictures[window:]))
    first = median(row["TTFT ms"] for row in sent[1:])
    return [
        {"": name, **_medians(rows[1:]), "× re-sending": _medians(rows[1:])["TTFT ms"] / first}
        for name, rows in (("watching ahead", ahead), ("re-sending", sent))
    ]


async def _watched(
    web: httpx.AsyncClient, base_url: str, plan: Plan, pictures: list[bytes], api_key: str | None
) -> Row:
    told: asyncio.Queue[bool] = asyncio.Queue()

    def hear(event: dict[str, Any]) -> None:
        if event["type"] == "mmserve.frame.ack":
            told.put_nowait(event["kept"])

    patient = {**plan.whole_policy, "deadline_ms": None}
    policy = {**patient, "sensitivity": 1.0, "window_items": 4 * len(pictures)}
    client = LiveClient(
        base_url, api_key=api_key, policy=policy, max_tokens=plan.max_tokens, give_up_s=0, on_event=hear
    )
    async with client:
        for picture in pictures:
            await _kept(client, told, picture)
        await _rest(web)
        return await _asked(client)


async def _kept(client: LiveClient, told: asyncio.Queue[bool], picture: bytes) -> None:
    """Show a picture until it is kept; one that came too soon is shown again."""
    ended = asyncio.create_task(client.ended())
    try:
        async with asyncio.timeout(SETTLE_S):
            while True:
                client.put(picture)
                ack = asyncio.create_task(told.get())
                await asyncio.wait({ack, ended}, return_when=asyncio.FIRST_COMPLETED)
                if ended.done():
                    ack.cancel()
                    raise ended.result()
                if ack.result():
                    return
    except TimeoutError:
        raise MMServeError(f"a frame was not kept within {SETTLE_S:.0f} s") from None
    finally:
        ended.cancel()


async def _asked(client: LiveClient) -> Row:
    asked, first, usage = time.perf_counter(), None, {}
    async with aclosing(client.ask(QUESTION)) as pieces:
        async for piece in pieces:
            first = first or time.perf_counter()
            usage = piece.usage
    assert first is not None
    prompt, cached = usage["input_tokens"], usage["input_token_details"]["cached_tokens"]
    return {"TTFT ms": 1e3 * (first - asked), "prompt tokens": prompt, "cached tokens": cached}


async def _sent(web: httpx.AsyncClient, url: str, model: str, plan: Plan, pictures: list[bytes]) -> Row:
    most = {"max_pixels": plan.policy["max_pixels"]} if "max_pixels" in plan.policy else {}
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(picture, "image/jpeg"), **most}}
        for picture in pictures
    ]
    body = {
        "model": model,
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": plan.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    trace = await chat(web, url, json.dumps(body).encode())
    if trace.error or trace.ttft is None:
        raise MMServeError(f"the window could not be asked about by a chat: {trace.error}")
    return {
        "TTFT ms": 1e3 * trace.ttft,
        "prompt tokens": trace.prompt_tokens,
        "cached tokens": trace.cached_tokens,
    }


async def _rest(web: httpx.AsyncClient) -> None:
    """Return when the server has computed what it was shown."""
    async with asyncio.timeout(SETTLE_S):
        while True:
            now = figures((await web.get("/metrics")).text)
            if not any(now.get(f"mmserve_{name}") for name in IDLE):
                return
            await asyncio.sleep(REST_S)


def _medians(rows: list[Row]) -> Row:
    return {name: median(row[name] for row in rows) for name in rows[0]}
