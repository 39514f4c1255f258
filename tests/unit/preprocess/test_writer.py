"""What a prompt's end tells about the answer: whether it begins with thoughts, and how they are told."""

import pytest
from helpers.tiny_folder import TEMPLATE, token_ids, write_folder

from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, Message, SamplingParams, TextPart
from mmserve.core.thinking import Start
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

SWITCHED = (
    TEMPLATE + "{%- if add_generation_prompt -%}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{%- elif opened -%}{{ '<think>\\n' }}{%- endif -%}{%- endif -%}"
)


def prepared(folder, text="hi", **fields):
    processor = Processor(ProcessorSpec.load(folder), MediaOptions())
    sampling = SamplingParams(thinking_budget=fields.pop("budget", None), stop_token_ids=(5,))
    chat = ChatInput(
        request_id="a", messages=(Message("user", (TextPart(text),)),), sampling=sampling, **fields
    )
    return processor.prepare(chat)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, template=SWITCHED)


@pytest.mark.parametrize(
    ("kwargs", "start"),
    [({}, Start.UNDECIDED), ({"opened": True}, Start.INSIDE), ({"enable_thinking": False}, Start.OUTSIDE)],
)
def test_the_end_of_the_prompt_decides_where_the_answer_begins(folder, kwargs, start):
    found = prepared(folder, template_kwargs=kwargs, budget=7)
    assert found.start is start
    thinking = found.request.thinking
    if start is Start.OUTSIDE:
        assert thinking is None
        return
    ids = token_ids()
    assert (thinking.open_id, thinking.close_id) == (ids["<think>"], ids["</think>"])
    assert ids["</think>"] in thinking.closing
    assert set(thinking.ends) == {5, ids["<|im_end|>"], ids["<|endoftext|>"]}
    assert (thinking.inside, thinking.budget) == (start is Start.INSIDE, 7)


def test_a_template_without_thoughts_and_a_raw_prompt_begin_with_the_answer(tmp_path, folder):
    assert prepared(write_folder(tmp_path / "plain"), "I <think>").start is Start.OUTSIDE
    raw = prepared(folder, prompt="a<think>\n")
    assert (raw.start, raw.request.thinking) == (Start.OUTSIDE, None)


def test_tags_that_are_no_tokens_can_have_no_budget(folder):
    file = folder / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("</think>", "</thunk>"), encoding="utf-8")
    found = prepared(folder)
    assert (found.start, found.request.thinking) == (Start.UNDECIDED, None)
    with pytest.raises(InvalidRequest) as refusal:
        prepared(folder, budget=3)
    assert refusal.value.param == "thinking_token_budget"
    prepared(folder, budget=3, template_kwargs={"enable_thinking": False})
