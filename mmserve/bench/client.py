"""One streamed chat with any OpenAI-compatible server, and when each piece of it came."""

import json
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx

WORDS = ("content", "reasoning_content", "reasoning")  # the fields of a delta that hold words


@dataclass
class Trace:
    """One request as its caller saw it. Times are seconds of ``time.perf_counter``.

    ``pieces`` are the moments at which words came. Token counts are the server's own, None where it tells
    none. ``error`` is the kind of failure, None for an answer that came to its end.
    """

    sent: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer; the pieces are counted where the server does not tell."""
        return self.usage.get("completion_tokens") or len(self.pieces)

    @property
    def prompt_tokens(self) -> int | None:
        return self.usage.get("prompt_tokens")

    @property
    def cached_tokens(self) -> int | None:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @property
    def ttft(self) -> float | None:
        """Seconds to the first words."""
        return self.pieces[0] - self.sent if self.pieces else None

    @property
    def gaps(self) -> list[float]:
        """Seconds from piece to piece: the latency between tokens, where a piece is a token."""
        return [after - before for before, after in pairwise(self.pieces)]

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first, however they were packed into pieces."""
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1) if len(self.pieces) > 1 else None

    @property
    def e2e(self) -> float:
        return self.ended - self.sent


class StreamError(Exception):
    """The server told of an error in mid-stream, or its stream was cut."""


async def chat(client: httpx.AsyncClient, url: str, body: bytes, trace: Trace | None = None) -> Trace:
    """Send ``body`` to ``url`` and read the answer to its end. What goes wrong is told by ``Trace.error``.

    A caller who wants to look on meanwhile, or to keep what came before it cancels, brings the ``trace``.
    """
    trace = trace or Trace(0.0)
    trace.sent = time.perf_counter()
    try:
        async with client.stream("POST", url, content=body, headers=JSON) as answer:
            if answer.status_code == 200:
                await _read(answer, trace)
            else:
                trace.error = f"HTTP {answer.status_code}"
    except httpx.TimeoutException:
        trace.error = "timeout"
    except httpx.HTTPError as error:
        trace.error = type(error).__name__
    except (StreamError, ValueError):
        trace.error = "broken stream"
    finally:
        trace.ended = time.perf_counter()
    return trace


async def _read(answer: httpx.Response, trace: Trace) -> None:
    async for event in events(answer):
        now = time.perf_counter()
        words = "".join(_words(choice.get("delta") or {}) for choice in event.get("choices") or ())
        if words:
            trace.pieces.append(now)
            trace.text += words
        trace.usage = event.get("usage") or trace.usage


def _words(delta: Mapping[str, Any]) -> str:
    return next((delta[name] for name in WORDS if delta.get(name)), "")


async def events(answer: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON events of a stream up to its ``[DONE]``; StreamError for an error event or no such end."""
    async for line in answer.aiter_lines():
        name, _, data = line.partition(":")
        if name != "data":
            continue
        if data.strip() == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise StreamError(str(event["error"]))
        yield event
    raise StreamError("the stream ended without [DONE]")


async def first_model(client: httpx.AsyncClient, base_url: str) -> str:
    """The first model that a server names; httpx.HTTPError or ValueError if it names none."""
    answer = await client.get(f"{base_url}/v1/models")
    answer.raise_for_status()
    models = answer.json().get("data") or ()
    if not models:
        raise ValueError("it names no model")
    return str(models[0]["id"])


JSON = {"content-type": "application/json"}
