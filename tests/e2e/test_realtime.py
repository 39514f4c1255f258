"""/v1/realtime over real sockets: the protocol, with the official client where that can say it."""

import asyncio
import base64
import contextlib
import io
import json
import random
import socket
import struct
import time

import httpx
import openai
import pytest
import uvicorn
from fake_service import ANSWER
from helpers.realtime_client import PATIENCE_S, item, joined, kinds, knocking, said, text_of
from live_server import serving
from PIL import Image
from websockets.exceptions import ConnectionClosed
from word_service import WordService

from mmserve.core.config import Config
from mmserve.core.errors import ContextLengthExceeded
from mmserve.launch import base_url, bound, server_config
from mmserve.server import socket_wire
from mmserve.server.app import create_app

MODEL = "mmserve/tiny-vl"
SENTENCE = "".join(ANSWER)
KEY = "k" * 20

ONE_ITEM = ["conversation.item.added", "conversation.item.done"]
AN_ANSWER = [
    "response.created",
    "rate_limits.updated",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    *["response.output_text.delta"] * len(ANSWER),
    "response.output_text.done",
    "response.content_part.done",
    "conversation.item.done",
    "response.output_item.done",
    "response.done",
]


def picture(kind="PNG", colour="red"):
    out = io.BytesIO()
    Image.new("RGB", (64, 48), colour).save(out, kind)
    return out.getvalue()


def data_url(data, kind="png"):
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def service():
    return WordService()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, Config()) as url:
        yield url


async def quiet(service):
    """Return when nothing runs in ``service`` any more."""
    end = time.monotonic() + PATIENCE_S
    while service.running:
        assert time.monotonic() < end, "something still runs"
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------- the official client


@pytest.fixture
def official(url):
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", websocket_base_url=f"{url.replace('http', 'ws', 1)}/v1", api_key="none"
    )


async def test_the_official_client_holds_a_conversation(official, service):
    async with official.realtime.connect(model=MODEL) as connection:
        await connection.session.update(
            session={"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]}
        )
        texts = []
        for question in ("hi", "and?"):
            await connection.conversation.item.create(item=said(question))
            await connection.response.create()
            async for event in connection:
                if event.type == "response.output_text.done":
                    texts.append(event.text)
                elif event.type == "response.done":
                    break
    assert texts == [SENTENCE, SENTENCE]
    assert event.response.status == "completed"
    heard = [(m.role, "".join(p.text for p in m.content)) for m in service.asked[-1].messages]
    assert heard == [("system", "Be brief."), ("user", "hi"), ("assistant", SENTENCE), ("user", "and?")]


async def test_a_picture_is_a_part_of_the_conversation(official, service):
    content = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": data_url(picture()), "detail": "auto"},
    ]
    async with official.realtime.connect(model=MODEL) as connection:
        await connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": content}
        )
        await connection.response.create()
        async for event in connection:
            if event.type == "conversation.item.done" and event.item.role == "user":
                shown = event.item
            if event.type == "response.done":
                break
        await connection.conversation.item.retrieve(item_id=shown.id)
        whole = (await connection.recv()).item
    assert [type(p).__name__ for p in service.asked[-1].messages[0].content] == ["TextPart", "ImagePart"]
    assert event.response.usage.input_token_details.image_tokens == 4
    assert shown.content[1].image_url is None  # what was sent is not sent back unasked
    assert whole.content[1].image_url == data_url(picture())


# ---------------------------------------------------------------- events and their order


async def test_events_come_in_the_order_of_the_protocol(url):
    async with joined(url) as client:
        await client.send({"type": "session.update", "session": {"type": "realtime"}})
        assert kinds(await client.until("session.updated")) == ["session.updated"]
        events = await client.ask("hi")
    assert kinds(events) == ONE_ITEM + AN_ANSWER
    assert text_of(events) == SENTENCE
    assert len({e["event_id"] for e in client.heard}) == len(client.heard)


async def test_the_session_tells_what_it_is_set_to(url):
    async with knocking(url, f"?model={MODEL}") as client:
        session = (await client.event())["session"]
        assert (session["model"], session["type"], session["output_modalities"]) == (
            MODEL,
            "realtime",
            ["text"],
        )
        fields = {
            "instructions": "Look.",
            "max_output_tokens": 3,
            "truncation": {"type": "retention_ratio", "retention_ratio": 0.5},
            "mmserve": {"fps": 5, "delta_age": True, "sampling": {"temperature": 0}},
        }
        await client.send({"type": "session.update", "session": fields})
        session = (await client.event())["session"]
    assert (session["instructions"], session["max_output_tokens"]) == ("Look.", 3)
    assert session["truncation"]["retention_ratio"] == 0.5
    own = session["mmserve"]
    assert (own["fps"], own["delta_age"], own["sampling"]) == (5, True, {"temperature": 0})


async def test_a_field_that_is_left_out_stays_and_null_is_the_default(url):
    async with joined(url) as client:
        for session in ({"instructions": "Look.", "max_output_tokens": 3}, {"max_output_tokens": None}):
            await client.send({"type": "session.update", "session": session})
            updated = (await client.event())["session"]
    assert (updated["instructions"], updated["max_output_tokens"]) == ("Look.", "inf")


async def test_a_response_is_done_with_its_usage_and_items(url):
    async with joined(url) as client:
        done = (await client.ask("hi", metadata={"for": "me"}))[-1]["response"]
    assert (done["status"], done["metadata"]) == ("completed", {"for": "me"})
    assert done["status_details"] == {"type": "completed"}
    assert done["output"][0]["content"] == [{"type": "output_text", "text": SENTENCE}]
    usage = done["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (10, 6, 16)
    assert usage["input_token_details"]["cached_tokens"] == 3


async def test_an_answer_that_is_cut_off_is_incomplete(url):
    async with joined(url) as client:
        done = (await client.ask("hi", max_output_tokens=2))[-1]["response"]
    assert (done["status"], done["output"][0]["status"]) == ("incomplete", "incomplete")
    assert done["status_details"]["reason"] == "max_output_tokens"
    assert done["output"][0]["content"][0]["text"] == "A red "


async def test_a_response_that_fails_is_done_with_the_reason(url):
    async with joined(url) as client:
        done = (await client.ask("fail"))[-1]["response"]
        assert (done["status"], done["status_details"]["error"]["message"]) == ("failed", "lost")
        assert done["output"][0]["status"] == "incomplete"
        done = (await client.ask("and now?"))[-1]["response"]
        assert done["status"] == "completed"  # the session has not suffered


async def test_a_fault_of_ours_is_told_without_its_insides(url, caplog):
    async with joined(url) as client:
        done = (await client.ask("break"))[-1]["response"]
    assert done["status"] == "failed"
    assert "a fault in the engine" not in json.dumps(done)
    assert "a fault in the engine" in caplog.text


async def test_a_response_has_instructions_and_limits_of_its_own(url, service):
    async with joined(url) as client:
        await client.send({"type": "session.update", "session": {"instructions": "Long."}})
        await client.until("session.updated")
        await client.ask("hi", instructions="Short.", max_output_tokens=5)
        assert (service.asked[-1].messages[0].content[0].text, service.asked[-1].sampling.max_tokens) == (
            "Short.",
            5,
        )
        await client.ask("hi")
        assert service.asked[-1].messages[0].content[0].text == "Long."


async def test_an_answer_out_of_band_leaves_the_conversation_alone(url, service):
    async with joined(url) as client:
        events = await client.ask("hi", conversation="none")
        assert "conversation.item.added" not in kinds(events)[2:]
        assert events[-1]["response"]["conversation_id"] is None
        await client.ask("and?")
    assert [m.role for m in service.asked[-1].messages] == ["user", "user"]


async def test_a_response_may_bring_its_own_items_and_name_others(url, service):
    async with joined(url) as client:
        await client.send(item("one", id="first"), item("two"))
        wanted = {
            "conversation": "none",
            "input": [{"type": "item_reference", "id": "first"}, said("three")],
        }
        await client.send({"type": "response.create", "response": wanted})
        await client.until("response.done")
    assert [m.content[0].text for m in service.asked[-1].messages] == ["one", "three"]


async def test_sampling_is_set_for_the_session_or_for_one_response(url, service):
    async with joined(url) as client:
        session = {"mmserve": {"sampling": {"temperature": 0.25, "seed": 7}}}
        await client.send({"type": "session.update", "session": session})
        await client.until("session.updated")
        await client.ask("hi")
        assert (service.asked[-1].sampling.temperature, service.asked[-1].sampling.seed) == (0.25, 7)
        await client.ask("hi", mmserve={"sampling": {"top_p": 0.5}})
        assert (service.asked[-1].sampling.temperature, service.asked[-1].sampling.top_p) == (0.7, 0.5)


# ---------------------------------------------------------------- items


async def test_items_are_put_where_they_are_wanted_deleted_and_retrieved(url, service):
    async with joined(url) as client:
        await client.send(item("b", id="b"), item("d", id="d"))
        await client.send({**item("c", id="c"), "previous_item_id": "b"})
        await client.send({**item("a", id="a"), "previous_item_id": "root"})
        await client.send({"type": "conversation.item.delete", "item_id": "d"})
        await client.send({"type": "conversation.item.retrieve", "item_id": "b"})
        events = await client.until("conversation.item.retrieved")
        previous = [e["previous_item_id"] for e in events if e["type"] == "conversation.item.added"]
        assert previous == [None, "b", "b", None]
        assert [e["item_id"] for e in events if e["type"] == "conversation.item.deleted"] == ["d"]
        assert events[-1]["item"]["content"] == [{"type": "input_text", "text": "b"}]
        await client.send({"type": "response.create"})
        await client.until("response.done")
    assert [m.content[0].text for m in service.asked[-1].messages] == ["a", "b", "c"]


async def test_an_answer_can_be_deleted_and_brought(url, service):
    async with joined(url) as client:
        answer = (await client.ask("hi"))[-1]["response"]["output"][0]["id"]
        await client.send({"type": "conversation.item.delete", "item_id": answer})
        await client.send({"type": "conversation.item.create", "item": said("I say so.", role="assistant")})
        await client.ask("and?")
    heard = [(m.role, m.content[0].text) for m in service.asked[-1].messages]
    assert heard == [("user", "hi"), ("assistant", "I say so."), ("user", "and?")]


async def test_a_conversation_that_outgrows_the_context_loses_its_oldest_items(url, service):
    async with joined(url) as client:
        await client.send(*(item("x" * 900, id=f"i{number}") for number in range(6)))
        events = await client.ask("still there?")
        gone = [e["item_id"] for e in events if e["type"] == "conversation.item.deleted"]
        assert events[-1]["response"]["status"] == "completed"
        assert gone == [f"i{number}" for number in range(len(gone))]
        assert 1 <= len(gone) <= 3
        await client.send({"type": "conversation.item.retrieve", "item_id": "i0"})
        assert (await client.event())["error"]["code"] == "not_found"


async def test_a_conversation_is_not_cut_where_that_is_disabled(url):
    async with joined(url) as client:
        await client.send({"type": "session.update", "session": {"truncation": "disabled"}})
        await client.send(*(item("x" * 900) for _ in range(6)))
        done = (await client.ask("still there?"))[-1]["response"]
    assert done["status"] == "failed"
    assert done["status_details"]["error"]["code"] == ContextLengthExceeded.code


async def test_the_last_question_is_never_cut(url):
    async with joined(url) as client:
        done = (await client.ask("x" * 6000))[-1]["response"]
    assert done["status_details"]["error"]["code"] == ContextLengthExceeded.code


async def test_a_conversation_has_bounded_memory(service):
    with serving(service, Config.of(realtime_conversation_mib=1)) as url:
        async with joined(url) as client:
            await client.send(*(item("word " * 80_000, id=f"i{n}") for n in range(4)))
            events = []
            while kinds(events).count("conversation.item.done") < 4:
                events.append(await client.event())
            await client.send({"type": "conversation.item.retrieve", "item_id": "i3"})
            events += await client.until("conversation.item.retrieved")
            gone = [e["item_id"] for e in events if e["type"] == "conversation.item.deleted"]
            assert gone == ["i0", "i1"]
            await client.send(item("x" * (1 << 20)))
            assert (await client.event())["error"]["code"] == "conversation_full"


# ---------------------------------------------------------------- tools


class ToolService(WordService):
    """Calls a tool when it is shown one."""

    async def generate(self, chat):
        calls = ['<tool_call>\n{"name": "look", ', '"arguments": {"at": "door"}}\n</tool_call>']
        self.scripts = {"open?": calls} if "tools" in chat.template_kwargs else {}
        async for output in super().generate(chat):
            yield output


TOOL = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}
TEMPLATE = "{% if tools %}<tools></tools><tool_call>{{ tools | tojson }}</tool_call>{% endif %}"


async def test_calls_of_tools_are_items_and_their_results_go_back():
    service = ToolService()
    service.spec.chat_template = TEMPLATE
    with serving(service, Config()) as url:
        async with joined(url) as client:
            await client.send({"type": "session.update", "session": {"tools": [TOOL]}})
            await client.until("session.updated")
            events = await client.ask("open?")
            assert [k for k in kinds(events) if "delta" not in k][2:] == [
                "response.created",
                "rate_limits.updated",
                "response.output_item.added",
                "conversation.item.added",
                "response.function_call_arguments.done",
                "conversation.item.done",
                "response.output_item.done",
                "response.done",
            ]
            call = events[-1]["response"]["output"][0]
            assert (call["name"], json.loads(call["arguments"])) == ("look", {"at": "door"})
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It is shut."}
            await client.send({"type": "conversation.item.create", "item": result})
            await client.ask("so?")
    roles = [(m.role, "tool_calls" in m.extra) for m in service.asked[-1].messages]
    assert roles == [("user", False), ("assistant", True), ("tool", False), ("user", False)]


async def test_a_tool_that_is_wrong_is_named_and_changes_nothing(url):
    async with joined(url) as client:
        session = {"instructions": "New.", "tools": [{"type": "function", "name": "no spaces"}]}
        await client.send({"type": "session.update", "event_id": "mine", "session": session})
        error = (await client.event())["error"]
        assert (error["param"], error["event_id"]) == ("session.tools[0].name", "mine")
        await client.send({"type": "session.update", "session": {}})
        assert (await client.event())["session"]["instructions"] == ""


# ---------------------------------------------------------------- cancel, and several at once


async def test_an_answer_is_cancelled_in_its_middle(url, service):
    async with joined(url) as client:
        await client.send(item("long"), {"type": "response.create"})
        await client.until("response.output_text.delta")
        await client.send({"type": "response.cancel"})
        events = await client.until("response.done")
        await quiet(service)
        assert kinds(events)[-5:] == AN_ANSWER[-5:]
        done = events[-1]["response"]
        assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
        heard = text_of(client.heard)
        assert done["output"][0]["content"][0]["text"] == heard
        assert done["output"][0]["status"] == "incomplete"
        assert len(heard) < 5000
        await client.ask("go on")
    assert service.asked[-1].messages[1].content[0].text == heard  # what was said stays said


async def test_a_response_is_cancelled_as_soon_as_it_is_created(url, service):
    async with joined(url) as client:
        await client.send(item("long"), {"type": "response.create"}, {"type": "response.cancel"})
        events = await client.until("response.done")
        assert events[-1]["response"]["status"] == "cancelled"
        assert kinds(events).count("response.created") == 1
        await quiet(service)


async def test_nothing_to_cancel_is_an_error_and_nothing_more(url):
    async with joined(url) as client:
        await client.send({"type": "response.cancel", "event_id": "mine"})
        error = (await client.event())["error"]
        assert (error["code"], error["event_id"]) == ("response_cancel_not_active", "mine")
        assert (await client.ask("hi"))[-1]["response"]["status"] == "completed"


async def test_a_conversation_has_one_response_at_a_time_and_others_beside_it(url, service):
    async with joined(url) as client:
        await client.send(item("long"), {"type": "response.create"}, {"type": "response.create"})
        events = await client.until("error")
        assert events[-1]["error"]["code"] == "conversation_already_has_active_response"
        wanted = {"conversation": "none", "input": [said("hi")], "metadata": {"n": "2"}}
        await client.send({"type": "response.create", "response": wanted})
        done = (await client.until("response.done"))[-1]["response"]
        assert (done["metadata"], done["status"]) == ({"n": "2"}, "completed")
        await client.send({"type": "response.cancel"})
        assert (await client.until("response.done"))[-1]["response"]["status"] == "cancelled"
        await quiet(service)


async def test_responses_beside_the_conversation_are_limited(url, service):
    async with joined(url) as client:
        wanted = {"conversation": "none", "input": [said("long")]}
        await client.send(*({"type": "response.create", "response": wanted} for _ in range(9)))
        assert (await client.until("error"))[-1]["error"]["code"] == "too_many_responses"
    await quiet(service)


async def test_two_clients_know_nothing_of_each_other(url, service):
    async with joined(url) as one, joined(url) as two:
        await one.send(item("only mine"))
        await asyncio.gather(one.ask("hi"), two.ask("hi"))
        assert [m.content[0].text for m in service.asked[-1].messages].count("hi") == 1
        assert {len(chat.messages) for chat in service.asked[-2:]} == {1, 2}


async def test_who_leaves_in_the_middle_of_an_answer_leaves_nothing_behind(url, service):
    async with joined(url) as client:
        await client.send(item("long"), {"type": "response.create"})
        await client.until("response.output_text.delta")
        assert service.running
    await quiet(service)


# ---------------------------------------------------------------- what is wrong is told, and the socket stays


@pytest.mark.parametrize(
    ("event", "code", "param"),
    [
        ("{", "invalid_json", None),
        ("[]", "invalid_value", None),
        ('"hi"', "invalid_value", None),
        ("{}", "invalid_value", "type"),
        ('{"type": 5}', "invalid_value", "type"),
        ('{"type": "no.such.event"}', "invalid_value", "type"),
        ('{"type": "response.cancel", "event_id": 5}', "invalid_value", "event_id"),
        ('{"type": "conversation.item.create"}', "missing_required_parameter", "item"),
        ('{"type": "conversation.item.create", "item": 5}', "invalid_value", "item"),
        ('{"type": "conversation.item.create", "item": {}}', "unsupported_value", "item.type"),
        (
            '{"type": "conversation.item.create", "item": {"type": "mcp_call"}}',
            "unsupported_value",
            "item.type",
        ),
        ('{"type": "conversation.item.delete", "item_id": "none"}', "not_found", "item_id"),
        (
            '{"type": "response.create", "response": {"conversation": "mine"}}',
            "invalid_value",
            "response.conversation",
        ),
        ('{"type": "response.create"}', "invalid_value", None),
        ('{"type": "input_audio_buffer.append", "audio": ""}', "unsupported_value", "type"),
        ('{"type": "input_audio_buffer.commit"}', "unsupported_value", "type"),
        ('{"type": "output_audio_buffer.clear"}', "unsupported_value", "type"),
        (
            '{"type": "conversation.item.truncate", "item_id": "a", "content_index": 0, "audio_end_ms": 0}',
            "unsupported_value",
            "type",
        ),
    ],
)
async def test_what_is_wrong_with_an_event_is_named(url, event, code, param):
    async with joined(url) as client:
        await client.send(event)
        error = (await client.event())["error"]
        assert (error["code"], error["param"]) == (code, param)
        assert (await client.ask("hi"))[-1]["response"]["status"] == "completed"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ({"type": "transcription"}, "session.type"),
        ({"output_modalities": ["audio"]}, "session.output_modalities"),
        ({"audio": {"input": {}}}, "session.audio"),
        ({"prompt": {"id": "p"}}, "session.prompt"),
        ({"tracing": "auto"}, "session.tracing"),
        ({"model": "gpt-realtime"}, "model"),
        ({"max_output_tokens": 0}, "session.max_output_tokens"),
        (
            {"truncation": {"type": "retention_ratio", "retention_ratio": 2}},
            "session.truncation.retention_ratio",
        ),
        ({"mmserve": {"fps": 0}}, "session.mmserve.fps"),
        ({"mmserve": {"no_such": 1}}, "session.mmserve.no_such"),
        ({"mmserve": {"frame_ack": "some"}}, "session.mmserve.frame_ack"),
        ({"mmserve": {"sampling": {"temperature": 9}}}, "session.mmserve.sampling.temperature"),
        ({"tool_choice": "required"}, "session.tool_choice"),
    ],
)
async def test_settings_that_cannot_be_are_refused_by_name(url, session, param):
    async with joined(url) as client:
        await client.send({"type": "session.update", "session": session, "event_id": "mine"})
        error = (await client.event())["error"]
    assert (error["param"], error["event_id"]) == (param, "mine")


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "input_audio", "audio": ""}], "item.content[0].type"),
        ([{"type": "input_image", "image_url": data_url(b"no picture")}], "item.content[0].image_url"),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text"}], "item.content[1].text"),
        ([{"type": "input_image"}], "item.content[0].image_url"),
        ([{"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"}], "item.content[0].image_url"),
        ([], "item.content"),
        ("hi", "item.content"),
    ],
)
async def test_a_part_that_cannot_be_is_named(url, content, param):
    async with joined(url) as client:
        new = {"type": "message", "role": "user", "content": content}
        await client.send({"type": "conversation.item.create", "item": new})
        error = (await client.event())["error"]
        assert error["param"] == param
        assert "messages[0]" not in error["message"]
        assert error["type"] == "invalid_request_error"


async def test_events_sent_as_binary_get_a_hint(url):
    async with joined(url) as client:
        await client.send(json.dumps(item("hi")).encode())
        assert (await client.event())["reason"] == "decode_error"
        assert "text messages" in (await client.event())["error"]["message"]


async def test_frames_that_are_no_picture_or_too_large_are_dropped_with_the_reason(service):
    with serving(service, Config.of(max_frame_bytes=2048)) as url:
        async with joined(url) as client:
            await client.send(b"junk", b"", picture("JPEG") + bytes(4096))
            acks = [await client.event() for _ in range(3)]
    assert [(a["seq"], a["kept"], a["reason"]) for a in acks] == [
        (1, False, "decode_error"),
        (2, False, "decode_error"),
        (3, False, "too_big"),
    ]


async def test_garbage_never_ends_a_session(url):
    rng = random.Random(7)
    whole = [
        json.dumps({"type": "session.update", "session": {"instructions": "x", "mmserve": {"fps": 2}}}),
        json.dumps(item("hi")),
        json.dumps({"type": "response.create", "response": {"input": [said("hi")], "conversation": "none"}}),
        json.dumps({"type": "response.cancel", "response_id": "x"}),
    ]
    values = ["null", "-1", "1e999", "[]", "{}", '""', '"\\ud800"', "true", "[[[[[[[[" + "]" * 8]
    async with joined(url) as client:
        for _ in range(300):
            text = rng.choice(whole)
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(len(text))
                text = rng.choice(
                    [text[:at] + text[at + 1 :], text[:at] + rng.choice(values) + text[at + 1 :], text[:at]]
                )
            await client.send(text)
        await client.send({"type": "conversation.item.create", "item": said("end", id="end")})
        while not (
            client.heard[-1]["type"] == "conversation.item.done" and client.heard[-1]["item"]["id"] == "end"
        ):
            await client.event()
        assert not [e for e in client.heard if e.get("error", {}).get("code") == "internal_error"]


async def test_deep_json_is_an_error_of_the_client(url):
    async with joined(url) as client:
        await client.send('{"type": "session.update", "session": ' + "[" * 100_000 + "]" * 100_000 + "}")
        assert (await client.event())["error"]["type"] == "invalid_request_error"


# ---------------------------------------------------------------- who may come in


@pytest.fixture(scope="module")
def keyed(service):
    with serving(service, Config.of(api_key=KEY)) as url:
        yield url


async def test_a_key_is_shown_in_the_header_or_as_browsers_can(keyed):
    async with joined(keyed, additional_headers={"authorization": f"Bearer {KEY}"}) as client:
        assert client.socket.subprotocol is None
    protocols = ["realtime", f"openai-insecure-api-key.{KEY}"]
    async with joined(keyed, subprotocols=protocols) as client:
        assert client.socket.subprotocol == "realtime"  # never the one with the key
    async with joined(keyed, subprotocols=[*protocols, "mmserve.frames.v1"]) as client:
        assert client.socket.subprotocol == "mmserve.frames.v1"


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"additional_headers": {"authorization": "Bearer wrong"}},
        {"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]},
    ],
)
async def test_who_shows_no_valid_key_is_told_and_closed_with_4401(keyed, shown):
    async with knocking(keyed, **shown) as client:
        code, reason, said = await client.closed()
    assert code == 4401
    assert "API key" in reason
    assert said[0]["error"]["code"] == "invalid_api_key"


async def test_pages_of_other_sites_are_kept_out_where_no_key_is_asked_for(url):
    async with knocking(url, origin="https://example.org") as client:
        assert (await client.closed())[0] == 1008
    async with joined(url, origin="http://localhost:3000"):
        pass


async def test_what_is_no_conversation_here_is_refused(url):
    for query in ("?intent=transcription", "?call_id=c", "?model=gpt-realtime", "?camera=none"):
        async with knocking(url, query) as client:
            code, reason, said = await client.closed()
        assert (code, said[0]["type"]) == (1008, "error")
        assert reason


async def test_a_full_server_says_so(service):
    with serving(service, Config.of(realtime_clients=1)) as url:
        async with joined(url):
            async with knocking(url) as client:
                code, reason, said = await client.closed()
            assert (code, said[0]["error"]["code"]) == (1013, "overloaded")
            assert "try again" in reason
        heard = "error"
        while heard == "error":  # until it has noticed that the first has left
            async with knocking(url) as client:
                heard = (await client.event())["type"]
        assert heard == "session.created"


def test_a_path_that_takes_no_websockets_is_refused(url):
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    headers["sec-websocket-key"] = base64.b64encode(bytes(16)).decode()
    assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 403


# ---------------------------------------------------------------- limits and ends


async def test_a_message_beyond_the_limit_closes_with_1009_and_nothing_else_notices(service):
    with serving(service, Config.of(max_message_bytes=100_000)) as url:
        async with joined(url) as other, joined(url) as client:
            with contextlib.suppress(ConnectionClosed):
                await client.send("x" * (100 << 20))
            assert (await client.closed())[0] == 1009
            assert (await other.ask("hi"))[-1]["response"]["status"] == "completed"


async def test_frames_of_a_message_are_limited_together(service):
    async def pieces():
        for _ in range(50):
            yield "x" * 10_000

    with serving(service, Config.of(max_message_bytes=100_000)) as url:
        async with joined(url) as client:
            with contextlib.suppress(ConnectionClosed):
                await client.socket.send(pieces())
            assert (await client.closed())[0] == 1009


async def test_nothing_is_compressed(url):
    async with joined(url, compression="deflate") as client:
        assert client.socket.protocol.extensions == []


async def test_text_that_is_no_utf8_closes_with_1007(url):
    async with joined(url) as client:
        await client.socket.send(b"\xff\xfe", text=True)
        assert (await client.closed())[0] == 1007


async def test_a_client_that_says_too_much_is_closed_with_4429(service):
    with serving(service, Config.of(realtime_events=20)) as url:
        async with joined(url) as client:
            with contextlib.suppress(ConnectionClosed):
                await client.send(*[{"type": "response.cancel"}] * 60)
            code, reason, said = await client.closed()
    assert (code, "20 events" in reason) == (4429, True)
    assert len(said) < 60


async def test_rate_limits_tell_what_is_left(service):
    with serving(service, Config.of(realtime_events=20)) as url:
        async with joined(url) as client:
            told = next(e for e in await client.ask("hi") if e["type"] == "rate_limits.updated")
    [limit] = told["rate_limits"]
    assert (limit["name"], limit["limit"], limit["remaining"] in (18, 19)) == ("requests", 20, True)
    assert 3 < limit["reset_seconds"] <= 6


async def test_a_client_that_says_nothing_is_closed_with_4408_and_one_that_waits_is_not(service):
    with serving(service, Config.of(realtime_idle_s=1.5)) as url:
        async with joined(url) as waiting, joined(url) as silent:
            await waiting.send(
                item("long"), {"type": "response.create", "response": {"max_output_tokens": 500}}
            )
            assert (await silent.closed())[0] == 4408
            assert (await waiting.until("response.done"))[-1]["response"]["status"] == "incomplete"


async def test_a_client_that_does_not_read_is_closed_and_its_answer_ends(service):
    service.scripts["flood"] = ["x" * (1 << 16)] * 100_000
    with serving(service, Config()) as url, shaken(url) as sock:
        wanted = {"conversation": "none", "input": [said("flood")]}
        sock.sendall(masked(json.dumps({"type": "response.create", "response": wanted})))
        await until(lambda: service.running)
        await quiet(service)  # it was given up
        heard = rest_of(sock)
    assert struct.pack("!H", 1008) + b"the client does not read" in heard[-200:]


async def test_a_client_that_never_reads_again_is_cut_off(service, monkeypatch):
    monkeypatch.setattr(socket_wire, "LINGER_S", 0.1)
    service.scripts["flood"] = ["x" * (1 << 16)] * 100_000
    wanted = {"conversation": "none", "input": [said("flood")]}
    config = Config()
    async with running(create_app(service, config), config) as (url, server):
        with await asyncio.to_thread(shaken, url) as sock:
            sock.sendall(masked(json.dumps({"type": "response.create", "response": wanted})))
            await until(lambda: service.running)
            assert server.server_state.connections
            await until(lambda: not server.server_state.connections)
            assert not service.running


async def test_a_reset_in_the_middle_of_a_message_ends_that_client_alone(url, service):
    async with joined(url) as other:
        with shaken(url) as sock:
            sock.sendall(
                masked(json.dumps({"type": "response.create", "response": {"input": [said("long")]}}))
            )
            await until(lambda: service.running)
            sock.sendall(masked("x" * 1000)[:500])
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await quiet(service)
        assert (await other.ask("hi"))[-1]["response"]["status"] == "completed"


async def test_a_client_that_answers_no_ping_is_let_go(service):
    with serving(service, Config.of(realtime_ping_s=0.5)) as url, shaken(url) as sock:
        wanted = {"conversation": "none", "input": [said("long")]}
        sock.sendall(masked(json.dumps({"type": "response.create", "response": wanted})))
        await until(lambda: service.running)
        await quiet(service)


async def test_a_client_that_answers_pings_stays(service):
    with serving(service, Config.of(realtime_ping_s=1.0)) as url:
        async with joined(url) as client:
            await asyncio.sleep(2.5)
            assert (await client.ask("hi"))[-1]["response"]["status"] == "completed"


async def test_a_stopping_server_lets_an_answer_finish_and_closes_with_1001(service):
    config = Config()
    app = create_app(service, config)
    async with running(app, config) as (url, _):
        async with joined(url) as idle, joined(url) as busy:
            await busy.send(item("long"), {"type": "response.create", "response": {"max_output_tokens": 400}})
            await busy.until("response.output_text.delta")
            ending = asyncio.create_task(app.state.drain.run(PATIENCE_S))
            assert (await idle.closed())[0] == 1001
            await busy.send({"type": "response.create", "response": {"conversation": "none"}})
            done = (await busy.until("response.done"))[-1]["response"]
            assert done["output"][0]["content"][0]["text"] == "word " * 400
            code, reason, _ = await busy.closed()
            assert (code, reason) == (1001, "the server is stopping")
            assert "server_stopping" in json.dumps(busy.heard)
            await asyncio.wait_for(ending, PATIENCE_S)
        async with knocking(url) as late:
            assert (await late.closed())[0] == 1001


async def test_a_stopping_server_cuts_off_who_takes_longer_than_the_deadline(service):
    config = Config()
    app = create_app(service, config)
    async with running(app, config) as (url, _), joined(url) as client:
        await client.send(item("long"), {"type": "response.create"})
        await client.until("response.output_text.delta")
        ending = asyncio.create_task(app.state.drain.run(0.1))
        assert (await client.closed())[0] == 1001
        await asyncio.wait_for(ending, PATIENCE_S)
        await quiet(service)


@contextlib.asynccontextmanager
async def running(app, config):
    """The URL of a server for ``app`` on this test's own event loop, and the server."""
    with bound("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(app, config))
        task = asyncio.create_task(server._serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            yield base_url(listener), server
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, PATIENCE_S)


# ---------------------------------------------------------------- by hand


def shaken(url):
    """A socket on which the handshake is done and nothing is read."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    key = base64.b64encode(bytes(16)).decode()
    sock.sendall(
        f"GET /v1/realtime HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n".encode()
    )
    head = b""
    while b"\r\n\r\n" not in head:
        head += sock.recv(1)
    assert head.startswith(b"HTTP/1.1 101")
    return sock


def rest_of(sock):
    """All that still comes, until the server ends it."""
    sock.settimeout(PATIENCE_S)
    heard = bytearray()
    while data := sock.recv(1 << 20):
        heard += data
    return bytes(heard)


def masked(text):
    """A text message as a client sends it, under a mask of zeros."""
    data = text.encode()
    return b"\x81" + struct.pack("!BQ", 0x80 | 127, len(data)) + bytes(4) + data


async def until(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)
