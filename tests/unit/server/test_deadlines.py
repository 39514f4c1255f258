"""``deadline_ms``: checked, carried to the engine as a moment, and told as a 504 when it passes."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from mmserve.core.errors import DeadlineExceeded, InvalidRequest
from mmserve.core.messages import ChatInput, SamplingParams, TextOutput
from mmserve.generation import whole
from mmserve.server import captions
from mmserve.server.chat import ChatJob
from mmserve.server.completions import CompletionJob, CompletionRequest
from mmserve.server.deadline import deadline
from mmserve.server.protocol import CaptionRequest, ChatRequest, convert, decode
from mmserve.server.response_store import ResponseStore
from mmserve.server.responses import ResponseJob, ResponseRequest

BODIES = {
    ChatRequest: {"messages": [{"role": "user", "content": "hi"}]},
    ResponseRequest: {"input": "hi"},
    CompletionRequest: {"prompt": "hi"},
}


@pytest.mark.parametrize("kind", BODIES)
def test_every_endpoint_takes_it_and_checks_it(kind):
    def read(value):
        return decode(json.dumps({**BODIES[kind], "deadline_ms": value}).encode(), kind).deadline_ms

    assert read(250) == 250
    assert read(None) is None
    for wrong in (0, -1, 86_400_001, 1.5, "100"):
        with pytest.raises(InvalidRequest) as caught:
            read(wrong)
        assert caught.value.param == "deadline_ms"


@pytest.mark.parametrize("kind", BODIES)
def test_a_priority_that_no_message_can_carry_is_refused_by_name(kind):
    def read(value):
        return decode(json.dumps({**BODIES[kind], "priority": value}).encode(), kind).priority

    assert [read(value) for value in (-(2**63), 0, 2**63 - 1)] == [-(2**63), 0, 2**63 - 1]
    for wrong in (2**63, -(2**63) - 1, 10**30):
        with pytest.raises(InvalidRequest) as caught:
            read(wrong)
        assert caught.value.param == "priority"


def test_a_form_gives_it_as_text():
    assert convert({"deadline_ms": "250"}, CaptionRequest, strict=False).deadline_ms == 250


def test_it_counts_from_the_moment_the_request_came():
    assert deadline(100.0, 250) == 100.25
    assert deadline(100.0, None) is None


@pytest.mark.parametrize("fields", [{"deadline_ms": 250, "priority": 3}, {}])
async def test_every_endpoint_tells_the_engine_whose_it_is_and_by_when(fields):
    expected = ("ada", 100.25, 3) if fields else ("ada", None, 0)
    for kind, body in BODIES.items():
        wanted = decode(json.dumps({**body, **fields}).encode(), kind)
        chat = await _chat_of(wanted)
        assert (chat.owner, chat.deadline, chat.priority) == expected, kind


async def _chat_of(wanted, find=None, started=100.0):
    service = SimpleNamespace(spec=SimpleNamespace(sampling={}, chat_template=None), model_name="m")
    desk = SimpleNamespace(find=find or _nothing_found)
    if isinstance(wanted, ChatRequest):
        return (await ChatJob(service, desk, wanted, "ada", started)._chats())[0]
    if isinstance(wanted, ResponseRequest):
        return await ResponseJob(
            service, desk, ResponseStore(most_bytes=1 << 20), wanted, "ada", started
        )._chat()
    return CompletionJob(service, wanted, 8, "ada", started)._chats()[0]


@pytest.mark.parametrize("kind", [ChatRequest, ResponseRequest])
async def test_media_that_are_still_fetched_at_the_deadline_are_given_up(kind):
    given_up = []

    async def silent(refs, owner):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            given_up.append(owner)
            raise

    wanted = decode(json.dumps({**BODIES[kind], "deadline_ms": 20}).encode(), kind)
    with pytest.raises(DeadlineExceeded) as caught:
        await _chat_of(wanted, silent, time.monotonic())
    assert (caught.value.status, caught.value.param) == (504, "deadline_ms")
    assert given_up == ["ada"]


async def test_a_caption_gives_up_an_address_at_its_deadline(monkeypatch):
    async def silent(body, desk, owner):
        await asyncio.Event().wait()

    monkeypatch.setattr(captions, "sent", silent)
    wanted = convert({"deadline_ms": 20}, CaptionRequest)
    body = SimpleNamespace(read=lambda kind: wanted)
    service = SimpleNamespace(spec=SimpleNamespace(sampling={}, chat_template=None), model_name="m")
    with pytest.raises(DeadlineExceeded):
        await captions.CaptionJob(service, None, body, "ada", time.monotonic())._chat()


async def _nothing_found(refs, owner):
    assert (list(refs), owner) == ([], "ada")
    return {}


async def test_a_request_that_was_too_late_is_a_504_of_its_own_code():
    class Late:
        async def generate(self, chat):
            error = "the deadline of the request passed before its first token"
            yield TextOutput(
                request_id="r", text="", finish_reason="error", error=error, error_code=DeadlineExceeded.code
            )

    with pytest.raises(DeadlineExceeded) as caught:
        await whole(Late(), ChatInput(request_id="r", messages=(), sampling=SamplingParams()))
    assert (caught.value.status, caught.value.code) == (504, "deadline_exceeded")
    assert "before its first token" in caught.value.message
