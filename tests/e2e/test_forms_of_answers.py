"""The bundled model, asked for answers of a form: JSON of a schema, choices, patterns, calls and thoughts."""

import base64
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from live_server import serving

from mmserve.core.config import Config
from mmserve.models import tiny
from mmserve.models.hub import resolve
from mmserve.service import Service

SAMPLES = Path(tiny.__file__).parent / "samples"
LABEL = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("title", "medium", "date", "text")},
    "required": ["title", "medium", "date", "text"],
    "additionalProperties": False,
}
AS_LABEL = {"type": "json_schema", "json_schema": {"name": "label", "schema": LABEL, "strict": True}}
COLOURS = ["Red.", "Green.", "Blue.", "Yellow.", "White.", "Purple."]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["left", "right"]}, "times": {"enum": [1, 2, 3]}},
            "required": ["where", "times"],
            "additionalProperties": False,
        },
    },
}
TOOLS = (
    "{%- if tools %}{{ '<|im_start|>system\\n<tool_call> ' + (tools | tojson) "
    "+ '<|im_end|>\\n' }}{%- endif %}"
)
THOUGHTS = (
    "{%- if add_generation_prompt %}{{ '<think>\\n' }}"
    "{%- if enable_thinking is false %}{{ '\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


@pytest.fixture(scope="module")
def url():
    service = Service.load(Config())
    try:
        with serving(service, service.config) as url:
            yield url
    finally:
        service.close()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """The same weights behind a template that teaches tools and opens thoughts. They never learned either, so
    their words hang by a thread: in float32, lest the rounding of another batch or a cached prefix cut it.
    """
    folder, plain = tmp_path_factory.mktemp("thinker"), resolve("mmserve/tiny-vl")
    for file in plain.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    template = (plain / "chat_template.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TOOLS + template + THOUGHTS, encoding="utf-8")
    service = Service.load(Config.of(model=str(folder), dtype="float32", served_model_name="mmserve/tiny-vl"))
    try:
        with (
            serving(service, service.config) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
        ):
            yield client
    finally:
        service.close()


def picture(file="circle-rabbit.jpg"):
    return "data:image/jpeg;base64," + base64.b64encode((SAMPLES / file).read_bytes()).decode()


def asked(text, file="circle-rabbit.jpg"):
    parts = [{"type": "image_url", "image_url": {"url": picture(file)}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": parts}]


def ask(client, text, file="circle-rabbit.jpg", **fields):
    fields = {"temperature": 0, "max_tokens": 160, **fields}
    return client.chat.completions.create(model="mmserve/tiny-vl", messages=asked(text, file), **fields)


def kept_to(**form):
    return {"extra_body": {"structured_outputs": form}}


def said(answer):
    return answer.choices[0].message.content


def streamed(chunks):
    chunks = [chunk for chunk in chunks if chunk.choices]
    return "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason


# ---------------------------------------------------------------- forms


def test_a_placard_of_a_schema_tells_what_is_in_the_picture(client):
    answer = ask(client, "Write a placard.", response_format=AS_LABEL)
    label = json.loads(said(answer))
    assert list(label) == LABEL["required"]
    assert all(isinstance(value, str) for value in label.values())
    assert {"red", "circle", "rabbit", "yellow"} <= set(re.findall("[a-z]+", label["text"].lower()))
    assert answer.choices[0].finish_reason == "stop"


def test_a_choice_is_made_by_what_is_seen(client):
    files = {"circle-rabbit.jpg": "Yellow.", "hello.jpg": "Purple.", "apples.jpg": "White."}
    told = {f: said(ask(client, "What colour is the ground?", f, **kept_to(choice=COLOURS))) for f in files}
    assert told == files


def test_a_pattern_and_any_json(client):
    pattern = r"A [a-z ]{3,80}\."
    assert re.fullmatch(
        pattern, said(ask(client, "Describe this image.", "cat.jpg", **kept_to(regex=pattern)))
    )
    label = said(ask(client, "Write a placard.", "hello.jpg", response_format={"type": "json_object"}))
    assert isinstance(json.loads(label), dict)


def test_a_stream_says_what_the_whole_answer_says(client):
    whole = ask(client, "Write a placard.", response_format=AS_LABEL)
    stream = ask(client, "Write a placard.", response_format=AS_LABEL, stream=True)
    assert streamed(stream) == (said(whole), "stop")


def test_responses_keep_to_a_form_too(client):
    form = {"format": {"type": "json_schema", "name": "label", "schema": LABEL}}
    fields = {"max_output_tokens": 160, "temperature": 0, "text": form}
    given = [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": picture()},
                {"type": "input_text", "text": "Write a placard."},
            ],
        }
    ]
    answer = client.responses.create(model="mmserve/tiny-vl", input=given, **fields)
    assert answer.output_text == said(ask(client, "Write a placard.", response_format=AS_LABEL))


def test_neighbours_with_other_forms_and_with_none_change_nothing(client):
    jobs = [
        ("Write a placard.", {"response_format": AS_LABEL}),
        ("Describe this image.", {}),
        ("What colour is the ground?", kept_to(choice=COLOURS)),
        ("Describe this image.", kept_to(regex=r"A [a-z ]{3,80}\.")),
    ] * 2
    alone = [said(ask(client, text, **fields)) for text, fields in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(lambda job: said(ask(client, job[0], **job[1])), jobs))
    assert together == alone


def test_each_of_several_answers_has_the_form(client):
    answer = ask(client, "Write a placard.", n=3, temperature=1, seed=5, response_format=AS_LABEL)
    assert [list(json.loads(c.message.content)) for c in answer.choices] == [LABEL["required"]] * 3
    drawn = ask(client, "What colour is the ground?", n=4, temperature=2, seed=1, **kept_to(choice=COLOURS))
    assert {c.message.content for c in drawn.choices} <= set(COLOURS)


def test_stop_strings_and_limits_end_a_form_early(client):
    stopped = ask(client, "Write a placard.", response_format=AS_LABEL, stop=['", "medium"'])
    assert said(stopped).startswith('{"title": "')
    assert "medium" not in said(stopped)
    assert stopped.choices[0].finish_reason == "stop"
    cut = ask(client, "Write a placard.", response_format=AS_LABEL, max_tokens=7)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 7)
    assert said(ask(client, "Write a placard.", response_format=AS_LABEL)).startswith(said(cut))


def test_a_form_that_is_whole_ends_before_the_least_number_of_tokens(client):
    fields = kept_to(choice=COLOURS)
    fields["extra_body"]["min_tokens"] = 50
    answer = ask(client, "What colour is the ground?", **fields)
    assert said(answer) == "Yellow."
    assert answer.usage.completion_tokens < 50


def test_log_probabilities_are_told_of_a_form_as_of_any_answer(client):
    answer = ask(client, "Write a placard.", response_format=AS_LABEL, logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert len(told) == answer.usage.completion_tokens
    assert said(answer).startswith("".join(entry.token for entry in told[:5]))
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in told)


# ---------------------------------------------------------------- what is no form


def nested(depth):
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


def outputs(**fields):
    return json.dumps({"structured_outputs": fields})


def schema(text):
    """A body whose schema is ``text``, which may be more than json.dumps can write."""
    return '{"structured_outputs": {"json": ' + text + "}}"


BAD = {
    "a pattern that is none": (outputs(regex="("), 400, "structured_outputs.regex"),
    "a schema key of a wrong kind": (schema('{"properties": []}'), 400, "structured_outputs.json"),
    "a type that is none": (schema('{"type": "objekt"}'), 400, "structured_outputs.json"),
    "a grammar that is none": (outputs(grammar="no"), 400, "structured_outputs.grammar"),
    "a very deep schema": (schema(nested(5000)), 400, None),
    "a very deep schema as text": (outputs(json=nested(5000)), 400, "structured_outputs.json"),
    "a rather deep schema": (schema(nested(300)), None, None),
    "a schema beyond all size": (outputs(json={"enum": ["x" * 300_000]}), 400, "structured_outputs.json"),
    "a huge enum": (outputs(json={"enum": [f"option {i}" for i in range(15_000)]}), None, None),
    "a pattern that explodes": (outputs(regex="(((a{1,900}){1,900}){1,900}){1,900}b{5000}"), None, None),
    "a pattern that would go back and forth": (outputs(regex="(a+)+(a|a)*b{1,9}"), 200, None),
}


@pytest.mark.parametrize("name", BAD)
def test_a_form_that_cannot_be_kept_is_refused_or_answered_and_the_next_is_served(client, url, name):
    fields, status, param = BAD[name]
    body = json.dumps({"messages": asked("What is this?"), "max_tokens": 4, "temperature": 0})
    body = body[:-1] + ", " + fields[1:]
    answer = httpx.post(f"{url}/v1/chat/completions", content=body.encode(), timeout=300,
                        headers={"content-type": "application/json"})  # fmt: skip
    assert answer.status_code in ((status,) if status else (200, 400)), answer.text[:500]
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error["message"]
        assert param is None or error["param"] == param
    assert said(ask(client, "What colour is the ground?", **kept_to(choice=COLOURS))) == "Yellow."


# ---------------------------------------------------------------- calls and thoughts


def test_a_required_call_has_arguments_of_the_schema(thinker):
    fields = {"tools": [LOOK], "tool_choice": "required", "parallel_tool_calls": False}
    fields["extra_body"] = {"enable_thinking": False}
    [choice] = ask(thinker, "What is this?", **fields).choices
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "look")
    assert arguments["where"] in ("left", "right")
    assert arguments["times"] in (1, 2, 3)
    chunks = list(ask(thinker, "What is this?", stream=True, **fields))
    parts = [p for c in chunks if c.choices for p in c.choices[0].delta.tool_calls or ()]
    assert "".join(p.function.arguments for p in parts) == call.function.arguments


@pytest.mark.parametrize("budget", [0, 1, 6])
def test_thoughts_keep_to_their_budget_and_the_answer_to_its_form(thinker, budget):
    fields = {"response_format": AS_LABEL, "extra_body": {"thinking_token_budget": budget}}
    answer = ask(thinker, "Write a placard.", **fields)
    message = answer.choices[0].message
    assert list(json.loads(message.content)) == LABEL["required"]
    assert answer.usage.completion_tokens_details.reasoning_tokens <= budget
    assert bool(getattr(message, "reasoning_content", "")) <= bool(budget)
    assert streamed(ask(thinker, "Write a placard.", stream=True, **fields)) == (message.content, "stop")


def test_a_budget_without_a_form_ends_the_thoughts_and_lets_the_answer_be(thinker):
    neighbour = {"extra_body": {"enable_thinking": False}}
    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(ask, thinker, "Describe this image.", **neighbour)
        answer = ask(thinker, "Describe this image.", extra_body={"thinking_token_budget": 5})
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens <= 5
    assert answer.usage.completion_tokens > details.reasoning_tokens
    assert said(answer)
    assert "think>" not in said(answer)
    assert said(plain.result()) == said(ask(thinker, "Describe this image.", **neighbour))


def test_thoughts_are_items_of_a_response(thinker):
    answer = thinker.responses.create(
        model="mmserve/tiny-vl",
        input="Hello",
        max_output_tokens=60,
        temperature=0,
        extra_body={"thinking_token_budget": 5},
    )
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens <= 5
