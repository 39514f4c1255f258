"""Token ids of whole chats against transformers: the template, the tokenizer, the expansion."""

import json
from pathlib import Path

import pytest
from helpers import golden_cases as cases
from helpers.tiny_folder import token_ids, write_folder

from mmserve.core.config import MediaOptions
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart, VideoPart
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

NOTES = json.loads((Path(__file__).parent / "golden" / "prompts.json").read_text())
FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def processor_of(tmp_path, family):
    budget = cases.BUDGETS[family]
    return Processor(
        ProcessorSpec.load(write_folder(tmp_path, family, budget=budget, clip=budget)), MediaOptions()
    )


def part_of(part):
    if part[0] == "text":
        return TextPart(part[1])
    if part[0] == "image":
        return ImagePart(pixels=cases.picture(*part[1:]))
    return VideoPart(frames=cases.moving(*part[1:]))


def chat_of(chat):
    messages = tuple(Message(role, tuple(part_of(p) for p in parts)) for role, parts in chat)
    return ChatInput(request_id="r", messages=messages, sampling=SamplingParams())


def without_outer_marks(ids):
    """transformers 5.24 keeps the marks around a clip's placeholder, around the expanded clip.

    The models' first release, and vLLM, replace them; so do we. Exactly this is excepted.
    """
    special = token_ids()
    pads = (special["<|image_pad|>"], special["<|video_pad|>"])
    outer_start = [
        t == special["<|vision_start|>"] and after not in pads
        for t, after in zip(ids, [*ids[1:], 0], strict=True)
    ]
    outer_end = [
        t == special["<|vision_end|>"] and before not in pads
        for before, t in zip([0, *ids], ids, strict=False)
    ]
    return [t for t, a, b in zip(ids, outer_start, outer_end, strict=True) if not a and not b]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", cases.CHATS)
def test_ids_equal_the_combined_processor(tmp_path, family, name):
    expected = NOTES["prompts"][family][name]
    if family == "qwen3_vl":
        expected = without_outer_marks(expected)
    prepared = processor_of(tmp_path, family).prepare(chat_of(cases.CHATS[name]))
    assert prepared.request.token_ids.tolist() == expected


def test_seconds_per_grid_equal_the_combined_processor(tmp_path):
    processor = processor_of(tmp_path, "qwen2_5_vl")
    chat = chat_of(cases.CHATS["mixed"])
    media = [processor.see(p) for p in processor.parts(chat)]
    ours = [m.seconds_per_grid for m in media if m.kind == "video"]
    assert ours == NOTES["prompts"]["qwen2_5_vl"]["mixed seconds"]


@pytest.mark.parametrize("name", ["text", "two images"])
def test_prompt_equals_apply_chat_template(tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    processor = processor_of(tmp_path, "qwen3_vl")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.chat_template = (tmp_path / "chat_template.jinja").read_text()
    plain = cases.plain(cases.CHATS[name])
    expected = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert processor.chat_tokens(chat_of(cases.CHATS[name])) == list(expected)
