"""The whole engine against transformers' generate: paged cache, chunks and batches change nothing."""

import pytest
from helpers.engine_requests import drain, make_engine, prepared, tokens
from helpers.qwen_pairs import Pair

CASES = {
    "text": (23,),
    "two images": (4, ("image", 8, 4), 3, ("image", 10, 18), 5),
    "video": (6, ("video", 3, 4, 8), 6),
    "image and video": (2, ("image", 6, 4), 5, ("video", 2, 10, 6), 4, ("image", 4, 4), 3),
}


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("model"))


def test_32_greedy_tokens_equal_when_all_run_at_once_in_small_chunks(pair):
    prompts = {name: pair.prompt(*case, seed=1) for name, case in CASES.items()}
    engine = make_engine(pair, step_tokens=24, encoder_tokens=16)
    for name, prompt in prompts.items():
        engine.submit(prepared(pair, prompt, name, max_tokens=32))
    outputs = drain(engine)
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == pair.reference_greedy(prompt, 32), name
