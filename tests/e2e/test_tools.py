"""Thoughts and calls of tools as both endpoints of conversations tell them, with the official client."""

import json

import openai
import pytest
from fake_service import FakeService
from live_server import serving
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from mmserve.core.config import Config
from mmserve.core.thinking import Start

MODEL = "mmserve/tiny-vl"
EVENT = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LOOK = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": LOOK}
FLAT = {"type": "function", **LOOK}
CALL = '<tool_call>\n{"name": "look", "arguments": {"x": %d}}\n</tool_call>'
THOUGHT = "hm\n</think>\n\n"
SCRIPTS = {
    "call": [THOUGHT, "I look. ", CALL % 1, "\n", CALL % 2, ""],
    "say": [THOUGHT, "Noth", "ing."],
    "ponder": ["hm", " hm", ""],
}

IN_ARGUMENTS = (len(THOUGHT) + len("I look. ") + CALL.index('"x"')) // 5 + 1  # pieces up to there


class Scripted(FakeService):
    """Says each text of SCRIPTS in small pieces."""

    def __init__(self):
        super().__init__(template="<think> <tool_call>")
        self.scripts = {name: pieces("".join(texts)) for name, texts in SCRIPTS.items()}
        self.start = Start.INSIDE


def pieces(text):
    return [text[i : i + 5] for i in range(0, len(text), 5)]


@pytest.fixture(scope="module")
def service():
    return Scripted()


@pytest.fixture(scope="module")
def client(service):
    with (
        serving(service, Config()) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def chat(client, text, **fields):
    messages = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def called(message):
    return [(c.function.name, c.function.arguments) for c in message.tool_calls or ()]


def gathered(chunks):
    """A stream's chunks as (thoughts, words, calls, reason)."""
    thoughts, words, calls, reason = "", "", {}, None
    for chunk in chunks:
        [choice] = chunk.choices
        thoughts += getattr(choice.delta, "reasoning_content", None) or ""
        words += choice.delta.content or ""
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
            call["arguments"] += part.function.arguments
        reason = choice.finish_reason or reason
    return thoughts, words, list(calls.values()), reason


# ---------------------------------------------------------------- chat


def test_calls_come_whole_with_thoughts_and_words_apart(client):
    [choice] = chat(client, "call", tools=[TOOL]).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "I look.")
    assert called(choice.message) == [("look", '{"x": 1}'), ("look", '{"x": 2}')]
    assert choice.finish_reason == "tool_calls"
    assert len({call.id for call in choice.message.tool_calls}) == 2


def test_a_stream_adds_up_to_the_whole_answer(client):
    thoughts, words, calls, reason = gathered(chat(client, "call", tools=[TOOL], stream=True))
    assert (thoughts, words.strip(), reason) == ("hm", "I look.", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in calls] == [("look", '{"x": 1}'), ("look", '{"x": 2}')]
    assert all(call["id"].startswith("call_") for call in calls)


def test_the_clients_own_accumulator_reads_the_calls(client):
    messages = [{"role": "user", "content": "call"}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
        list(stream)
        final = stream.get_final_completion()
    assert called(final.choices[0].message) == [("look", '{"x": 1}'), ("look", '{"x": 2}')]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_where_calls_may_not_be_parallel_the_first_is_the_end(client, service, stream, n):
    fields = {"tools": [TOOL], "parallel_tool_calls": False, "n": n}
    if stream:
        chunks = list(chat(client, "call", stream=True, **fields))
        answers = [gathered(c for c in chunks if c.choices[0].index == i) for i in range(n)]
        assert [(len(calls), reason) for _, _, calls, reason in answers] == [(1, "tool_calls")] * n
    else:
        answer = chat(client, "call", **fields)
        assert [called(c.message) for c in answer.choices] == [[("look", '{"x": 1}')]] * n
        assert {c.finish_reason for c in answer.choices} == {"tool_calls"}
        assert answer.usage.completion_tokens < n * len(service.scripts["call"])
    assert service.running == 0


def test_a_call_that_is_cut_off_is_words(client):
    [choice] = chat(client, "call", tools=[TOOL], max_completion_tokens=IN_ARGUMENTS).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content == "I look. " + (CALL % 1)[: len(choice.message.content) - 8]


def test_without_tools_the_tags_are_words_and_thoughts_are_still_told(client):
    [choice] = chat(client, "call").choices
    assert choice.message.content == "I look. " + CALL % 1 + "\n" + CALL % 2
    assert choice.message.reasoning_content == "hm"
    assert choice.finish_reason == "stop"


def test_the_template_gets_the_tools_that_may_be_called(client, service):
    chat(client, "say", tools=[TOOL], extra_body={"enable_thinking": True})
    assert service.seen[-1].template_kwargs == {"enable_thinking": True, "tools": [TOOL]}
    chat(client, "say", tools=[TOOL], tool_choice="none")
    assert service.seen[-1].template_kwargs == {}


def test_a_required_call_is_held_by_a_grammar_and_a_free_one_is_not(client, service):
    chat(client, "call", tools=[TOOL])
    assert service.seen[-1].sampling.grammar is None
    chat(client, "call", tools=[TOOL], tool_choice="required")
    assert service.seen[-1].sampling.grammar.param == "tools"


def test_the_budget_of_thoughts_reaches_the_engine(client, service):
    chat(client, "say", extra_body={"thinking_token_budget": 7})
    assert service.seen[-1].sampling.thinking_budget == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
)
def test_tools_and_a_form_exclude_each_other(client, fields, param):
    with pytest.raises(openai.BadRequestError) as refusal:
        chat(client, "call", tools=[TOOL], **fields)
    assert refusal.value.param == param
    chat(client, "call", tools=[TOOL], tool_choice="none", **fields)


def test_earlier_calls_and_their_results_go_back_to_the_model(client, service):
    [choice] = chat(client, "call", tools=[TOOL]).choices
    turns = [{"role": "user", "content": "call"}, choice.message.to_dict()]
    turns += [
        {"role": "tool", "tool_call_id": call.id, "content": "red"} for call in choice.message.tool_calls
    ]
    client.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL])
    _, said, *results = service.seen[-1].messages
    assert [c["function"]["arguments"] for c in said.extra["tool_calls"]] == [{"x": 1}, {"x": 2}]
    assert said.extra["reasoning_content"] == "hm"
    assert [r.extra["tool_call_id"] for r in results] == [c.id for c in choice.message.tool_calls]


def test_log_probabilities_are_those_of_every_token(client, service):
    count = len(service.scripts["call"])
    [choice] = chat(client, "call", tools=[TOOL], logprobs=True).choices
    assert len(choice.logprobs.content) == count
    chunks = chat(client, "call", tools=[TOOL], logprobs=True, stream=True)
    told = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert sum(map(len, told)) == count


# ---------------------------------------------------------------- responses


def respond(client, given, **fields):
    return client.responses.create(model=MODEL, input=given, **fields)


def test_thoughts_messages_and_calls_are_items(client):
    answer = respond(client, "call", tools=[FLAT])
    assert [item.type for item in answer.output] == ["reasoning", "message", *["function_call"] * 2]
    thought, _, *calls = answer.output
    assert (thought.content[0].text, answer.output_text, thought.summary) == ("hm", "I look.", [])
    assert [(c.name, c.arguments, c.status) for c in calls] == [
        ("look", '{"x": 1}', "completed"),
        ("look", '{"x": 2}', "completed"),
    ]
    Response.model_validate(answer.to_dict(), strict=True)


def test_events_tell_of_each_item_from_its_beginning_to_its_end(client):
    events = list(respond(client, "call", tools=[FLAT], stream=True))
    for event in events:
        EVENT.validate_python(event.to_dict(), strict=True)
    kinds = [e.type.removeprefix("response.") for e in events]
    runs = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    text = ["content_part.done", "output_item.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    begun = ["output_item.added", "content_part.added"]
    assert runs == [
        *("created", "in_progress"),
        *begun,
        *("reasoning_text.delta", "reasoning_text.done", *text),
        *begun,
        *("output_text.delta", "output_text.done", *text),
        *call,
        "output_item.done",
        *call,
        "output_item.done",
        "completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    final = events[-1].response.output
    for index, item in enumerate(final):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        assert {e.item_id for e in own if hasattr(e, "item_id")} == {item.id}
        assert own[-1].item.to_dict() == item.to_dict()
    assert "".join(e.delta for e in events if e.type.endswith("arguments.delta")) == '{"x": 1}{"x": 2}'


def test_the_clients_own_accumulator_reads_a_response(client):
    with client.responses.stream(model=MODEL, input="call", tools=[FLAT]) as stream:
        final = list(stream)[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", *["function_call"] * 2]


@pytest.mark.parametrize("stored", [True, False])
def test_a_conversation_goes_on_with_the_results_of_calls(client, service, stored):
    first = respond(client, "call", tools=[FLAT])
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "red"} for c in calls]
    if stored:
        respond(client, results, previous_response_id=first.id, tools=[FLAT])
    else:
        asked = [{"role": "user", "content": "call"}]
        given = [*asked, *[item.to_dict() for item in first.output], *results]
        respond(client, given, tools=[FLAT], store=False)
    asked, said, *heard = service.seen[-1].messages
    assert [p.text for p in said.content] == ["I look."]
    assert said.extra["reasoning_content"] == "hm"
    assert [c["function"]["arguments"] for c in said.extra["tool_calls"]] == [{"x": 1}, {"x": 2}]
    assert [m.extra["tool_call_id"] for m in heard] == [c.call_id for c in calls]
    assert [m.content[0].text for m in heard] == ["red", "red"]


def test_a_call_that_is_cut_off_is_incomplete_and_its_words_follow(client, service):
    answer = respond(client, "call", tools=[FLAT], max_output_tokens=IN_ARGUMENTS)
    kinds = [(item.type, item.status) for item in answer.output[1:]]
    cut = [("function_call", "incomplete"), ("message", "incomplete")]
    assert (answer.status, kinds) == ("incomplete", [("message", "completed"), *cut])
    respond(client, "say", previous_response_id=answer.id)
    assert all("tool_calls" not in message.extra for message in service.seen[-1].messages)


def test_one_call_where_they_may_not_be_parallel(client):
    answer = respond(client, "call", tools=[FLAT], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert answer.status == "completed"


def test_the_request_is_told_back(client):
    schema = {"type": "json_schema", "name": "label", "schema": {"type": "object"}, "strict": True}
    choice = {"type": "function", "name": "look"}
    answer = respond(client, "call", tools=[FLAT], tool_choice=choice)
    assert answer.tools[0].name == "look"
    assert answer.tool_choice.name == "look"
    answer = respond(client, "say", text={"format": schema})
    assert (answer.text.format.name, answer.text.format.schema_) == ("label", {"type": "object"})


def test_a_form_and_thoughts_are_asked_for_here_too(client, service):
    schema = {"type": "json_schema", "name": "label", "schema": {"type": "object"}}
    respond(client, "say", text={"format": schema}, reasoning={"effort": "none"},
            extra_body={"thinking_token_budget": 3})  # fmt: skip
    chat = service.seen[-1]
    assert json.loads(chat.sampling.grammar.source) == {"type": "object"}
    assert chat.sampling.grammar.param == "text.format.schema"
    assert chat.sampling.thinking_budget == 3
    assert chat.template_kwargs == {"enable_thinking": False}
    with pytest.raises(openai.BadRequestError) as refusal:
        respond(client, "say", text={"format": schema}, tools=[FLAT])
    assert refusal.value.param == "text.format"


def test_the_items_of_an_input_are_listed_page_by_page(client):
    given = [{"role": "user", "content": str(i)} for i in range(5)]
    first = respond(client, [*given, {"type": "function_call_output", "call_id": "a", "output": "b"}])
    listed = client.responses.input_items.list(first.id, limit=2, order="asc")
    assert [item.content[0].text for item in listed.data] == ["0", "1"]
    every = list(client.responses.input_items.list(first.id, limit=2))
    assert [getattr(i, "content", None) and i.content[0].text for i in every] == [
        None,
        *map(str, range(4, -1, -1)),
    ]
    assert len({item.id for item in every}) == 6
    text = respond(client, "say")
    assert client.responses.input_items.list(text.id).data[0].content[0].text == "say"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")
    with pytest.raises(openai.BadRequestError):
        client.responses.input_items.list(text.id, limit=1000)
