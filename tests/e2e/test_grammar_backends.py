"""The bundled model's answers keep to their forms with either library, behind the same doors."""

import json
import re

import httpx
import openai
import pytest
from live_server import serving
from test_forms_of_answers import AS_LABEL, COLOURS, LABEL, ask, asked, kept_to, said

from mmserve.core.config import Config
from mmserve.engine.grammar.choose import EXTRA
from mmserve.service import Service

TYPED = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["shape", "animal"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "note": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/note"}]},
    },
    "required": ["title", "kind", "count", "code", "note"],
    "additionalProperties": False,
    "$defs": {"note": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}


@pytest.fixture(scope="module", params=["guidance", "xgrammar"])
def served(request):
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar", reason=f"xgrammar is no part of [dev]; this brings it: {EXTRA}")
    service = Service.load(Config.of(grammar_backend=request.param, engine_process=False))
    try:
        with serving(service, service.config) as url:
            yield request.param, url
    finally:
        service.close()


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served[1]}/v1", api_key="none", max_retries=0, timeout=300) as client:
        yield client


def test_a_placard_of_a_schema_tells_what_is_in_the_picture(client):
    answer = ask(client, "Write a placard.", response_format=AS_LABEL)
    label = json.loads(said(answer))
    assert list(label) == LABEL["required"]
    assert {"red", "circle", "rabbit", "yellow"} <= set(re.findall("[a-z]+", label["text"].lower()))
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_drawn_at_random_is_valid(client, seed):
    form = {"type": "json_schema", "json_schema": {"name": "typed", "schema": TYPED}}
    answer = ask(client, "Tell.", response_format=form, temperature=1.5, seed=seed, max_tokens=300)
    assert answer.choices[0].finish_reason == "stop"
    told = json.loads(said(answer))
    assert list(told) == TYPED["required"]
    assert len(told["title"]) <= 20
    assert told["kind"] in ("shape", "animal")
    assert 1 <= told["count"] <= 9
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}", told["code"])
    assert told["note"] is None or all(isinstance(flag, bool) for flag in told["note"])


def test_choices_patterns_and_any_object(client):
    assert said(ask(client, "What colour is the ground?", **kept_to(choice=COLOURS))) == "Yellow."
    pattern = r"A [a-z ]{3,80}\."
    assert re.fullmatch(
        pattern, said(ask(client, "Describe this image.", "cat.jpg", **kept_to(regex=pattern)))
    )
    label = said(ask(client, "Write a placard.", "hello.jpg", response_format={"type": "json_object"}))
    assert isinstance(json.loads(label), dict)


def test_a_grammar_is_kept_to_or_refused_with_the_way_out(served):
    name, url = served
    body = {"messages": asked("Hello"), "max_tokens": 8, "structured_outputs": {"grammar": 'start: "yes"'}}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
    if name == "guidance":
        assert answer.json()["choices"][0]["message"]["content"] == "yes"
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "invalid_grammar")
    assert error["param"] == "structured_outputs.grammar"
    assert "grammar_backend guidance" in error["message"]


def test_a_form_whose_step_is_over_the_limits_is_the_callers_to_mend(served, client):
    """It is small when it is compiled, and too much when it is met."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Tell.", extra_body={"structured_outputs": {"regex": "(a{1000}){1000}"}})
    assert caught.value.code == "invalid_grammar"
    assert caught.value.param == "structured_outputs.regex"
    assert "<state>" not in caught.value.message, "the library's inner state is nobody's business"
    assert said(ask(client, "Tell.", extra_body={"structured_outputs": {"regex": "a{3}"}})) == "aaa"
