"""Decoders and vision transformers against transformers, on the same random weights."""

import pytest
import torch
from helpers.qwen_pairs import MODELS, Pair

CASES = {
    "text": (23,),
    "one image": (5, ("image", 4, 6), 7),
    "wide image": (3, ("image", 6, 22), 4),
    "odd windows": (3, ("image", 10, 14), 4),
    "tiny image": (1, ("image", 2, 2), 2),
    "two images": (4, ("image", 8, 4), 3, ("image", 10, 18), 5),
    "same image size twice": (4, ("image", 6, 6), ("image", 6, 6), 5),
    "video": (6, ("video", 3, 4, 8), 6),
    "image and video": (2, ("image", 6, 4), 5, ("video", 2, 10, 6), 4, ("image", 4, 4), 3),
}
# Largest absolute differences in float32.
LOGITS = 1e-4
FEATURES = 1e-4
# In bfloat16 the yardstick is transformers itself: how far its bfloat16 log-probabilities lie from its own
# float32 ones, on average and at worst, and we may lie this much farther from the same float32 values.
BF16_MEAN, BF16_WORST = 1.5, 2.5
BF16_FEATURES = 0.05


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    return Pair(request.param, tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CASES)
def test_prefill_logits_equal(pair, case, record_difference):
    prompt = pair.prompt(*CASES[case])
    (found,) = pair.logits(prompt)
    wanted = pair.reference_logits(prompt)
    worst = (found - wanted).abs().max().item()
    record_difference(pair.name, f"logits, {case}", worst, LOGITS)
    assert wanted.std() > 0.3
    assert worst < LOGITS


@pytest.mark.parametrize("case", ["text", "two images", "video", "image and video"])
def test_32_greedy_tokens_equal(pair, case):
    prompt = pair.prompt(*CASES[case], seed=1)
    assert pair.greedy([prompt], 32)[0] == pair.reference_greedy(prompt, 32)


def test_batch_of_unlike_requests_equals_each_alone(pair, record_difference):
    prompts = [pair.prompt(*case, seed=i) for i, case in enumerate(CASES.values())]
    for prompt, found in zip(prompts, pair.logits(*prompts), strict=True):
        worst = (found - pair.reference_logits(prompt)).abs().max().item()
        record_difference(pair.name, "logits, batch of all cases", worst, LOGITS)
        assert worst < LOGITS
    chosen = pair.greedy(prompts[:4], 8)
    assert chosen == [pair.reference_greedy(prompt, 8) for prompt in prompts[:4]]


def test_encoder_features_equal(pair, record_difference):
    prompt = pair.prompt(*CASES["image and video"], ("image", 14, 26))
    found = pair.encode([prompt])[0]
    with torch.no_grad():
        for i, (_, pixels, grid) in enumerate(prompt.items):
            out = pair.reference.model.visual(
                pair.plain_patches(pixels, grid), grid_thw=torch.tensor([[1, *grid]])
            )
            wanted = torch.stack([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())], 1)
            part, found = found[: len(wanted)], found[len(wanted) :]
            worst = (part - wanted).abs().max().item()
            record_difference(pair.name, "encoder features", worst, FEATURES)
            assert worst < FEATURES, i


def test_plain_forms_equal_too(pair, record_difference, monkeypatch):
    """The oracle of every operation, linear in its plain form, gives the same answers."""
    from mmserve.models import registry
    from mmserve.models.ops.registry import reference_ops

    monkeypatch.setattr(registry, "choose_ops", lambda *_: reference_ops())
    plain = Pair(pair.name, pair.folder)
    assert set(plain.model.backends.values()) == {"torch", "plain"}
    prompt = plain.prompt(*CASES["image and video"])
    worst = (plain.logits(prompt)[0] - plain.reference_logits(prompt)).abs().max().item()
    record_difference(pair.name, "logits, plain operations", worst, LOGITS)
    assert worst < LOGITS


@pytest.fixture(scope="module")
def half(pair, tmp_path_factory):
    return Pair(pair.name, tmp_path_factory.mktemp("half"), dtype="bfloat16")


@pytest.mark.parametrize("case", ["text", "odd windows", "image and video"])
def test_bfloat16_is_as_close_to_float32_as_transformers_is(pair, half, case, record_difference):
    prompt = pair.prompt(*CASES[case])
    exact = pair.reference_logits(prompt).log_softmax(-1)
    theirs = (half.reference_logits(prompt).float().log_softmax(-1) - exact).abs()
    ours = (half.logits(prompt)[0].float().log_softmax(-1) - exact).abs()
    limit = BF16_WORST * theirs.max().item()
    record_difference(pair.name, f"bf16 log-probabilities, {case}", ours.max().item(), limit)
    assert ours.mean() < BF16_MEAN * theirs.mean()
    assert ours.max() < limit


def test_bfloat16_encoder_features_are_close(pair, half, record_difference):
    prompt = pair.prompt(*CASES["image and video"], ("image", 20, 28))
    worst = (pair.encode([prompt])[0] - half.encode([prompt])[0].float()).abs().max().item()
    record_difference(pair.name, "bf16 encoder features", worst, BF16_FEATURES)
    assert worst < BF16_FEATURES
