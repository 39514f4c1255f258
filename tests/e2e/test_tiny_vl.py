"""The bundled model: it is what transformers says it is, it sees, and neighbours change nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from mmserve import LLM, SamplingParams
from mmserve.core.config import MediaOptions
from mmserve.core.messages import ChatInput, ImagePart, Message, TextPart, VideoPart
from mmserve.models import tiny
from mmserve.models.tiny.evalset import read_evalset
from mmserve.models.tiny.evaluate import judge
from mmserve.models.tiny.example import Turn
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

HOME = Path(tiny.__file__).parent
CHECKPOINT, SAMPLES = HOME / "checkpoint", HOME / "samples"
GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
ASKED = "Describe this image."


def rows():
    return json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8"))


def chat(row, text=ASKED):
    kind = row["kind"]
    media = {"type": kind, kind: str(SAMPLES / row["file"])}
    return [{"role": "user", "content": [media, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def llm():
    with LLM() as model:
        yield model


def test_ships_within_its_size():
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 12 << 20


def test_captions_of_the_shipped_samples_are_true(llm):
    answers = llm.chat([chat(row) for row in rows()], GREEDY)
    wrong = [
        (row["caption"], answer.text)
        for row, answer in zip(rows(), answers, strict=True)
        if not judge(Turn("caption", "", row["caption"], _facts(row)), answer.text)
    ]
    assert not wrong


def test_eight_concurrent_chats_answer_as_one_at_a_time(llm):
    questions = [ASKED, "What colour is the ground?", "How many things are there?", "What is this?"]
    chats = [chat(row, text) for row in rows() for text in questions][:32]
    alone = [llm.chat(c, GREEDY)[0].text for c in chats]
    for first in range(0, len(chats), 8):
        together = llm.chat(chats[first : first + 8], GREEDY)
        assert [answer.text for answer in together] == alone[first : first + 8]


def test_evaluation_set_is_answered_far_better_than_by_chance(llm):
    asked = [(e, e.turns[0]) for condition, e in read_evalset() if condition == "clean"][:48]
    parts = [
        [
            {"type": "image", "image": e.frames[0]}
            if len(e.frames) == 1
            else {"type": "video", "video": list(e.frames), "fps": e.fps},
            {"type": "text", "text": turn.question},
        ]
        for e, turn in asked
    ]
    answers = llm.chat([[{"role": "user", "content": content}] for content in parts], GREEDY)
    right = sum(judge(turn, answer.text) for (_, turn), answer in zip(asked, answers, strict=True))
    assert right >= 0.6 * len(asked)


@pytest.mark.parametrize("name", ["cat.jpg", "village.jpg", "rocket.mp4"])
def test_transformers_loads_it_and_agrees(name):
    """Same prompt, same pixels: what both say of the next token and of all of the prompt, in float32."""
    folder = str(CHECKPOINT)
    reference = transformers.Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    row = next(r for r in rows() if r["file"] == name)
    data = (SAMPLES / name).read_bytes()
    part = ImagePart(data=data) if row["kind"] == "image" else VideoPart(data=data)
    message = Message("user", (part, TextPart(ASKED)))
    spec = ProcessorSpec.load(CHECKPOINT)
    chat_input = ChatInput(request_id="r", messages=(message,), sampling=GREEDY)
    request = Processor(spec, MediaOptions()).prepare(chat_input).request
    with torch.no_grad():
        logits = reference(**_inputs(request, spec)).logits[0]
    *prompt, expected = torch.log_softmax(logits, -1)
    asked = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, prompt_logprobs=3)
    with LLM(dtype="float32") as ours:
        [answer] = ours.chat(chat(row), asked)
    [told] = answer.logprobs
    for position, found in zip(prompt, answer.prompt_logprobs[1:], strict=True):
        assert found.logprob == pytest.approx(float(position[found.token_id]), abs=1e-3)
        assert [v for *_, v in found.top] == pytest.approx(position.topk(3).values.tolist(), abs=1e-3)
    assert answer.token_ids == [int(expected.argmax())]
    assert told.logprob == pytest.approx(float(expected.max()), abs=1e-4)


def _facts(row):
    return {"unknown": True, "colours": row["colours"]} if "colours" in row else {}


def _inputs(request, spec):
    ids = torch.from_numpy(request.token_ids.astype(np.int64))[None]
    grids = torch.tensor([[1, *item.grid] for item in request.items])
    patches = torch.cat([_patches(item, spec) for item in request.items])
    video = request.items[0].kind == "video"
    if video:
        grids = torch.tensor([[len(request.items), *request.items[0].grid]])
    kind = torch.zeros_like(ids)
    kind[(ids == spec.tokens.image) | (ids == spec.tokens.video)] = 2 if video else 1
    suffix = "_videos" if video else ""
    return {
        "input_ids": ids,
        "mm_token_type_ids": kind,
        f"{'video' if video else 'image'}_grid_thw": grids,
        f"pixel_values{suffix}": patches,
    }


def _patches(item, spec):
    """The plain form of the checkpoint's preprocessing: [h * w, 3 * 2 * patch * patch], float32."""
    frames = (torch.from_numpy(item.pixels.copy()).float() / 255 - 0.5) / 0.5
    frames = frames.expand(2, *frames.shape[1:]) if len(frames) == 1 else frames
    (h, w), m, p = item.grid, spec.merge, spec.patch
    blocks = frames.reshape(2, h // m, m, p, w // m, m, p, 3).permute(1, 4, 2, 5, 7, 0, 3, 6)
    return blocks.reshape(h * w, -1)
