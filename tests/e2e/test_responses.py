"""POST /v1/responses over a real socket, with the official client."""

import base64
import io

import httpx
import openai
import pytest
from fake_service import ANSWER, FakeService
from live_server import serving
from openai.types.responses import Response, ResponseStreamEvent
from PIL import Image
from pydantic import TypeAdapter

from mmserve.core.config import Config

SENTENCE = "".join(ANSWER)
EVENT = TypeAdapter(ResponseStreamEvent)


def picture():
    out = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


@pytest.fixture(scope="module")
def service():
    return FakeService()


@pytest.fixture(scope="module")
def url(service):
    with serving(service, Config()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def respond(client, given, **fields):
    return client.responses.create(model="mmserve/tiny-vl", input=given, **fields)


def heard(service):
    """The last conversation that the model was asked to go on with."""
    return [
        (m.role, [getattr(p, "text", type(p).__name__) for p in m.content]) for m in service.seen[-1].messages
    ]


def test_a_text_is_answered(client, service):
    answer = respond(client, "hi", instructions="Be brief.", temperature=0.5, top_p=0.9, max_output_tokens=50)
    assert (answer.status, answer.output_text) == ("completed", SENTENCE)
    Response.model_validate(answer.to_dict(), strict=True)
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (10, 6, 16)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert (answer.temperature, answer.top_p, answer.max_output_tokens) == (0.5, 0.9, 50)
    assert (answer.instructions, answer.tools, answer.error) == ("Be brief.", [], None)
    assert heard(service) == [("system", ["Be brief."]), ("user", ["hi"])]
    assert service.seen[-1].sampling.max_tokens == 50


def test_items_are_messages_with_pictures(client, service):
    content = [
        {"type": "input_text", "text": "What is it?"},
        {"type": "input_image", "image_url": picture(), "detail": "auto"},
    ]
    answer = respond(
        client, [{"role": "developer", "content": "Look."}, {"role": "user", "content": content}]
    )
    assert heard(service) == [("system", ["Look."]), ("user", ["What is it?", "ImagePart"])]
    assert answer.usage.to_dict()["input_tokens_details"]["image_tokens"] == 4


def test_an_answers_items_can_be_sent_back(client, service):
    first = respond(client, "hi", store=False)
    respond(client, [{"role": "user", "content": "hi"}, *first.output, {"role": "user", "content": "and?"}])
    assert heard(service) == [("user", ["hi"]), ("assistant", [SENTENCE]), ("user", ["and?"])]


def test_an_answer_that_is_cut_off_is_incomplete(client):
    answer = respond(client, "hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output_text, answer.output[0].status) == ("A red ", "incomplete")


# ---------------------------------------------------------------- streams


def test_a_stream_has_the_events_of_the_protocol_in_their_order(client):
    events = list(respond(client, "hi", stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(ANSWER),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == SENTENCE
    assert (events[0].response.status, events[0].response.usage) == ("in_progress", None)
    assert events[-1].response.output_text == SENTENCE
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {events[-1].response.output[0].id}
    for event in events:
        EVENT.validate_python(event.to_dict(), strict=True)


def test_the_clients_own_accumulator_understands_it(client):
    with client.responses.stream(model="mmserve/tiny-vl", input="hi") as stream:
        assert [e.snapshot for e in stream if e.type == "response.output_text.delta"][-1] == SENTENCE
        final = stream.get_final_response()
    assert final.output_text == SENTENCE
    assert client.responses.retrieve(final.id).output_text == SENTENCE


def test_a_stream_that_is_cut_off_ends_incomplete(client):
    last = list(respond(client, "hi", stream=True, max_output_tokens=2))[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", "A red ")


def test_every_event_carries_its_name(url):
    body = {"input": "hi", "stream": True}
    with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as answer:
        blocks = "".join(answer.iter_text()).strip().split("\n\n")
    assert all(block.startswith("event: response.") for block in blocks[:-1])


def test_a_failure_in_mid_stream_is_a_failed_response(client, service):
    last = list(respond(client, "fail", stream=True))[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "lost")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


# ---------------------------------------------------------------- conversations


def test_a_conversation_goes_on_from_a_stored_response(client, service):
    first = respond(client, [{"role": "user", "content": [{"type": "input_image", "image_url": picture()}]}],
                    instructions="Be brief.")  # fmt: skip
    second = respond(client, "Why?", previous_response_id=first.id, instructions="Be long.")
    assert second.previous_response_id == first.id
    respond(client, "Really?", previous_response_id=second.id)
    assert heard(service) == [
        ("user", ["ImagePart"]),
        ("assistant", [SENTENCE]),
        ("user", ["Why?"]),
        ("assistant", [SENTENCE]),
        ("user", ["Really?"]),
    ]


def test_a_stored_response_can_be_read_and_deleted(client):
    first = respond(client, "hi", metadata={"topic": "demo"})
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert first.metadata == {"topic": "demo"}
    client.responses.delete(first.id)
    for attempt in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            attempt(first.id)
    with pytest.raises(openai.BadRequestError) as refusal:
        respond(client, "and?", previous_response_id=first.id)
    assert (refusal.value.param, refusal.value.code) == (
        "previous_response_id",
        "previous_response_not_found",
    )


def test_what_may_not_be_stored_is_not(client):
    answer = respond(client, "hi", store=False)
    assert answer.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


# ---------------------------------------------------------------- errors


def image(url):
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
    return [{"role": "user", "content": parts}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "b"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "a", "arguments": "{}"}]}, "input[0].name"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
        ({"input": [{"type": "reasoning", "content": "hm"}]}, "input[0].content"),
        ({"input": [{"role": "judge", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content[0].type"),
        ({"input": image("data:image/png;base64,AAAA")}, "input[0].content[1].image_url"),
        ({"input": image("ftp://x/y.png"), "instructions": "a"}, "input[0].content[1].image_url"),
        ({"input": "x" * 6000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "look"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_a_400_that_names_it(url, fields, param, stream):
    answer = httpx.post(f"{url}/v1/responses", json={"input": "hi", "stream": stream, **fields}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_error_message_names_the_input_too(url):
    answer = httpx.post(
        f"{url}/v1/responses", json={"input": [{"role": "judge", "content": "a"}]}, timeout=60
    )
    message = answer.json()["error"]["message"]
    assert "input[0].role" in message
    assert "messages" not in message


def test_fields_that_ask_for_nothing_are_fine(client):
    idle = {"tools": [], "tool_choice": "auto", "truncation": "disabled", "reasoning": {"effort": None}}
    answer = respond(client, "hi", **idle, text={"format": {"type": "text"}}, service_tier="auto", user="u")
    assert answer.status == "completed"


def test_an_unknown_model_is_a_404(client):
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="hi")
