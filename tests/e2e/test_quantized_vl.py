"""The bundled model with int8 weights and activations sees what it saw before."""

import json
from pathlib import Path

from mmserve import LLM, SamplingParams
from mmserve.models import tiny
from mmserve.models.tiny.evaluate import judge
from mmserve.models.tiny.example import Turn

SAMPLES = Path(tiny.__file__).parent / "samples"


def chat(row):
    media = {"type": row["kind"], row["kind"]: str(SAMPLES / row["file"])}
    return [{"role": "user", "content": [media, {"type": "text", "text": "Describe this image."}]}]


def test_captions_of_the_shipped_samples_are_true_with_int8():
    rows = json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8"))
    with LLM(quantization="int8") as llm:
        answers = llm.chat([chat(row) for row in rows], SamplingParams(temperature=0.0, max_tokens=96))
    for row, answer in zip(rows, answers, strict=True):
        facts = {"unknown": True, "colours": row["colours"]} if "colours" in row else {}
        assert judge(Turn("caption", "", row["caption"], facts), answer.text), (row["caption"], answer.text)
