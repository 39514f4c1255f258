"""/v1/realtime with the bundled model: conversations about pictures, and cameras that are asked about now."""

import asyncio
import base64
import contextlib
import json
import struct
import time
from pathlib import Path

import openai
import pytest
from helpers.realtime_client import Client, joined, kinds, said, text_of
from live_server import serving

from mmserve.core.config import Config
from mmserve.models import tiny
from mmserve.service import Service

SAMPLES = Path(tiny.__file__).parent / "samples"
GREEDY = {"temperature": 0}
DESCRIBE = "Describe this image."
PATIENCE_S = 60.0


def sample(name):
    return (SAMPLES / name).read_bytes()


def framed(seq, data, seconds=None):
    """A frame behind its header; ``seconds`` is Unix time."""
    flags, micros = (0, 0) if seconds is None else (3, int(seconds * 1e6))
    return struct.pack("!2sBBIQ", b"MF", 1, flags, seq, micros) + data


@pytest.fixture(scope="module", params=["load", "start"], ids=["one process", "processes"])
def service(request):
    service = getattr(Service, request.param)(Config())
    yield service
    service.close()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, service.config) as url:
        yield url


@contextlib.asynccontextmanager
async def camera(url, subprotocols=None, query="", **policy):
    """A client that is set up to watch, with greedy answers."""
    async with joined(url, query, subprotocols=subprotocols) as client:
        session = {"mmserve": {"sampling": GREEDY, "delta_age": True, "fps": 30, **policy}}
        await client.send({"type": "session.update", "session": session})
        await client.until("session.updated")
        yield client


async def acknowledged(client: Client, seq: int):
    """The fate of frame ``seq``."""
    while True:
        for event in client.heard:
            if event["type"] == "mmserve.frame.ack" and event["seq"] == seq:
                return event
        await client.event()


async def asked(client, text, **response):
    """The events of the answer to ``text``, without those of frames."""
    await client.send({"type": "response.create", "response": {"instructions": text, **response}})
    events = await client.until("response.done")
    return [e for e in events if not e["type"].startswith("mmserve.")]


# ---------------------------------------------------------------- without a camera


async def test_the_official_client_asks_about_a_picture_and_goes_on(url):
    client = openai.AsyncOpenAI(websocket_base_url=f"{url.replace('http', 'ws', 1)}/v1", api_key="none")
    data = "data:image/jpeg;base64," + base64.b64encode(sample("cat.jpg")).decode()
    picture = {"type": "input_image", "image_url": data}
    answers, usages = [], []
    async with client.realtime.connect(model="mmserve/tiny-vl") as connection:
        session = {"type": "realtime", "output_modalities": ["text"], "mmserve": {"sampling": GREEDY}}
        await connection.send({"type": "session.update", "session": session})
        for content in (
            [picture, {"type": "input_text", "text": DESCRIBE}],
            [{"type": "input_text", "text": "What colour is the ground?"}],
        ):
            await connection.conversation.item.create(
                item={"type": "message", "role": "user", "content": content}
            )
            await connection.response.create()
            async for event in connection:
                assert event.type != "error", event
                if event.type == "response.output_text.done":
                    answers.append(event.text)
                elif event.type == "response.done":
                    usages.append(event.response.usage)
                    break
    assert "cat" in answers[0]
    assert "green" in answers[1].lower()
    assert usages[0].input_token_details.image_tokens > 0
    assert usages[1].input_token_details.cached_tokens > 0  # the conversation so far, picture and all


async def test_a_conversation_goes_on_beyond_the_models_context(url, service):
    async with joined(url) as client:
        session = {"max_output_tokens": 4, "mmserve": {"sampling": GREEDY}}
        await client.send({"type": "session.update", "session": session})
        await client.until("session.updated")
        gone, statuses = 0, []
        while not gone:
            events = await client.ask("A red circle on a blue ground. " * 60)
            gone = kinds(events).count("conversation.item.deleted")
            statuses.append(events[-1]["response"]["status"])
            assert len(statuses) < 100
        usage = (await client.ask("What is this?"))[-1]["response"]["usage"]
    assert set(statuses) <= {"completed", "incomplete"}
    assert gone >= 2  # in bulk
    assert usage["input_token_details"]["cached_tokens"] > usage["input_tokens"] // 2


# ---------------------------------------------------------------- cameras


async def test_a_frame_is_seen_and_answers_tell_how_old_it_is(url):
    async with camera(url) as client:
        await client.send(sample("cat.jpg"))
        ack = await acknowledged(client, 1)
        assert (ack["kept"], ack["reason"]) == (True, "kept")
        assert ack["age_ms"] > 0
        events = await asked(client, DESCRIBE)
        assert "cat" in text_of(events)
        deltas = [e["mmserve"] for e in events if e["type"] == "response.output_text.delta"]
        assert {d["frame_seq"] for d in deltas} == {1}
        assert all(d["age_ms"] > 0 for d in deltas)
        done = events[-1]["response"]
        assert (done["status"], done["mmserve"]["frame_seq"]) == ("completed", 1)
        assert (
            done["usage"]["input_token_details"]["cached_tokens"] > 0
        )  # it was computed before the question


async def test_events_about_a_camera_come_in_the_same_order(url):
    async with camera(url) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        found = [k for k in kinds(await asked(client, DESCRIBE)) if not k.endswith(".delta")]
    assert found == [
        "response.created",
        "rate_limits.updated",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "conversation.item.done",
        "response.output_item.done",
        "response.done",
    ]


async def test_a_new_scene_is_what_the_next_answer_is_about(url):
    async with camera(url, subprotocols=["realtime", "mmserve.frames.v1"], window_items=1) as client:
        for seq, (name, thing) in enumerate([("cat.jpg", "cat"), ("apples.jpg", "apple")], start=70):
            await client.send(framed(seq, sample(name), time.time()))
            assert (await acknowledged(client, seq))["kept"]
            events = await asked(client, DESCRIBE)
            assert thing in text_of(events)
            assert events[-1]["response"]["mmserve"]["frame_seq"] == seq


async def test_what_shows_nothing_new_is_told_to_be_unchanged(url):
    async with camera(url) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send(sample("cat.jpg"))
        ack = await acknowledged(client, 2)
    assert (ack["kept"], ack["reason"]) == (False, "unchanged")


async def test_a_frame_that_was_captured_long_ago_is_late(url):
    async with camera(url, subprotocols=["mmserve.frames.v1"], max_frame_age_ms=1000) as client:
        await client.send(framed(5, sample("cat.jpg"), time.time() - 30))
        ack = await acknowledged(client, 5)
    assert (ack["kept"], ack["reason"]) == (False, "late")


async def test_items_and_frames_share_one_context(url):
    async with camera(url) as client:
        await client.send({"type": "conversation.item.create", "item": said("Hello.")})
        await client.until("conversation.item.done")
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send({"type": "conversation.item.create", "item": said(DESCRIBE)})
        await client.send({"type": "response.create"})
        events = await client.until("response.done")
        assert "cat" in text_of(events)
        system = said("Be brief.", role="system")
        await client.send({"type": "conversation.item.create", "item": system})
        assert (await client.until("error"))[-1]["error"]["param"] == "item.role"


async def test_an_item_can_be_deleted_while_a_camera_runs(url):
    async with camera(url) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send({"type": "conversation.item.create", "item": said("Hello.", id="mine")})
        await client.until("conversation.item.done")
        await client.send({"type": "conversation.item.delete", "item_id": "mine"})
        await client.until("conversation.item.deleted")
        assert "cat" in text_of(await asked(client, DESCRIBE))


async def test_a_newer_question_cuts_the_answer_under_way(url):
    async with camera(url, sampling={**GREEDY, "ignore_eos": True}) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send({"type": "response.create", "response": {"instructions": DESCRIBE}})
        await client.until("response.output_text.delta")
        events = await asked(client, DESCRIBE, max_output_tokens=8)
        first = events[-1]["response"]
        assert (first["status"], first["status_details"]["reason"]) == ("cancelled", "turn_detected")
        second = (await client.until("response.done"))[-1]["response"]
        assert second["status"] == "incomplete"
    created = [i for i, e in enumerate(client.heard) if e["type"] == "response.created"]
    done = [i for i, e in enumerate(client.heard) if e["type"] == "response.done"]
    assert created[0] < done[0] < created[1] < done[1]


async def test_an_answer_under_way_may_finish_where_the_policy_says_so(url):
    async with camera(url, on_new_question="finish") as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send({"type": "response.create", "response": {"instructions": DESCRIBE}})
        first = (await asked(client, DESCRIBE))[-1]["response"]
        second = (await client.until("response.done"))[-1]["response"]
    assert [first["status"], second["status"]] == ["completed", "completed"]


async def test_an_answer_about_a_camera_is_cancelled(url):
    async with camera(url, sampling={**GREEDY, "ignore_eos": True}) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send({"type": "response.create", "response": {"instructions": DESCRIBE}})
        await client.until("response.output_text.delta")
        await client.send({"type": "response.cancel"})
        done = (await client.until("response.done"))[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        assert (await asked(client, DESCRIBE, max_output_tokens=4))[-1]["response"]["status"] == "incomplete"


async def test_an_answer_about_a_camera_has_a_deadline(url):
    async with camera(url, sampling={**GREEDY, "ignore_eos": True}) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        done = (await asked(client, DESCRIBE, mmserve={"deadline_ms": 1, "sampling": GREEDY}))[-1]["response"]
        assert (done["status"], done["status_details"]["error"]["code"]) == ("failed", "deadline_exceeded")
        assert (await asked(client, DESCRIBE, max_output_tokens=4))[-1]["response"]["status"] == "incomplete"


async def test_answers_that_a_change_starts_are_responses_too(url):
    async with camera(url, trigger="change", question=DESCRIBE) as client:
        await client.send(sample("cat.jpg"))
        assert "cat" in text_of(await client.until("response.done"))
        await client.send(sample("apples.jpg"))
        await client.until("response.done")
    assert kinds(client.heard).count("response.created") >= 2


async def test_answers_that_a_change_starts_are_given_as_the_session_is_set_to(url):
    schema = {"type": "object", "properties": {"seen": {"const": "a cat"}}, "required": ["seen"]}
    form = {**GREEDY, "structured_outputs": {"json": {**schema, "additionalProperties": False}}}
    async with camera(url, trigger="change", question=DESCRIBE, sampling=form) as client:
        await client.send(sample("cat.jpg"))
        assert json.loads(text_of(await client.until("response.done"))) == {"seen": "a cat"}
        await client.send({"type": "session.update", "session": {"type": "realtime", "max_output_tokens": 3}})
        await client.until("session.updated")
        await client.send(sample("apples.jpg"))
        done = (await client.until("response.done"))[-1]["response"]
        assert done["status_details"]["reason"] == "max_output_tokens"


async def test_a_question_with_items_of_its_own_sees_no_camera(url):
    async with camera(url) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        await client.send(
            {"type": "response.create", "response": {"input": [said("Hello.")], "conversation": "none"}}
        )
        done = (await client.until("response.done"))[-1]["response"]
    assert done["usage"]["input_token_details"]["image_tokens"] == 0
    assert "mmserve" not in done


async def test_stats_come_as_often_as_they_are_wanted(url):
    async with camera(url, stats_every_s=0.2, frame_ack="none") as client:
        await client.send(sample("cat.jpg"))
        stats = (await client.until("mmserve.stats"))[-1]["stats"]
        while not stats["frames"]["kept"]:
            stats = (await client.until("mmserve.stats"))[-1]["stats"]
    assert "mmserve.frame.ack" not in kinds(client.heard)
    assert stats["context_tokens"] > 0


async def test_a_flood_of_frames_and_junk_ends_nobody(url):
    names = ("cat.jpg", "apples.jpg", "village.jpg")
    files = [sample(name) for name in names]
    async with camera(url) as other, camera(url, fps=5) as client:
        await other.send(files[0])
        await acknowledged(other, 1)
        for number in range(600):
            await client.send(files[number % 3] if number % 4 else b"\xff\xd8\xff junk")
        await client.send({"type": "conversation.item.create", "item": said("Hello.", id="end")})
        await client.until("conversation.item.done")
        await acknowledged(client, 600)
        assert "cat" in text_of(await asked(other, DESCRIBE))
        assert (await asked(client, DESCRIBE))[-1]["response"]["status"] == "completed"


async def test_a_camera_that_leaves_leaves_nothing_behind(url, service):
    async with camera(url) as client:
        await client.send(sample("cat.jpg"))
        await acknowledged(client, 1)
        assert len(service.live.sessions) >= 1
        await client.send({"type": "response.create", "response": {"instructions": DESCRIBE}})
        await client.until("response.created")
    end = time.monotonic() + PATIENCE_S
    while service.live.sessions:
        assert time.monotonic() < end
        await asyncio.sleep(0.02)


async def test_a_full_server_refuses_another_camera_with_the_reason():
    service = Service.load(Config.of(max_live_sessions=1))
    try:
        with serving(service, service.config) as url:
            async with camera(url) as first, camera(url) as second:
                await first.send(sample("cat.jpg"))
                await acknowledged(first, 1)
                await second.send(sample("cat.jpg"))
                code, reason, heard = await second.closed()
                assert (code, json.dumps(heard).count("overloaded")) == (1013, 1)
                assert reason
                assert "cat" in text_of(await asked(first, DESCRIBE))
    finally:
        service.close()
