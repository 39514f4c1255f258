import math

import numpy as np
import pytest
import torch

from mmserve.core.messages import PreparedRequest, SamplingParams
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.sampling.draw import Cuts, threshold
from mmserve.engine.sampling.noise import uniforms
from mmserve.engine.sampling.sampler import Sampler
from mmserve.engine.scheduler.request import Request

VOCAB = 3000


def request(name="r", prompt=(1, 2, 3), answer=(), seed=0, stop_ids=(), **sampling):
    tokens = np.array(prompt, dtype=np.int32)
    prepared = PreparedRequest(
        request_id=name,
        token_ids=tokens,
        radix_keys=tokens.astype(np.int64),
        positions=np.zeros((3, len(tokens)), np.int32),
        position_delta=0,
        items=(),
        sampling=SamplingParams(**sampling),
    )
    made = Request(prepared, 0, 100, frozenset(stop_ids), PageTable(1), seed=seed)
    for token in answer:
        made.append(token)
    return made


def tokens(sampled):
    return [token for token, _ in sampled]


def test_greedy_takes_the_largest_logit():
    logits = torch.randn(5, VOCAB, dtype=torch.bfloat16)
    assert tokens(Sampler().sample(logits, [request(temperature=0.0)] * 5)) == logits.argmax(-1).tolist()


def test_a_request_draws_the_same_tokens_alone_and_in_any_batch():
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB) * 3
    requests = [
        request("a", seed=1),
        request("b", seed=2, top_k=20, top_p=0.8),
        request("c", seed=3, min_p=0.05, temperature=1.7),
        request("d", temperature=0.0),
        request("e", seed=4, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5),
        request("f", seed=5, top_k=1),
    ]
    together = Sampler().sample(logits, requests)
    alone = [Sampler().sample(logits[i : i + 1], [r])[0] for i, r in enumerate(requests)]
    assert together == alone
    assert tokens(together)[5] == int(logits[5].argmax())


@pytest.mark.parametrize("sampling", [{"temperature": 1e-300}, {"temperature": 1e-40}, {"top_k": 10**30}])
def test_values_beyond_any_tensor_mean_what_they_say_and_spare_the_neighbours(sampling):
    torch.manual_seed(2)
    logits = torch.randn(2, VOCAB) * 3
    odd, other = request("odd", seed=1, **sampling), request("other", seed=2)
    plain = request("plain", seed=1)
    expected = Sampler().sample(logits, [plain, other])
    found = Sampler().sample(logits, [odd, other])
    assert found[1] == expected[1]
    wanted = expected[0][0] if "top_k" in sampling else int(logits[0].argmax())
    assert found[0][0] == wanted


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_logits_still_give_a_token_of_the_vocabulary(value):
    logits = torch.full((1, VOCAB), value)
    [(token, _)] = Sampler().sample(logits, [request(temperature=1.0, top_p=0.9)])
    assert 0 <= token < VOCAB


def test_the_next_step_of_one_seed_draws_afresh():
    logits = torch.zeros(1, VOCAB)
    drawn = {tokens(Sampler().sample(logits, [request(seed=9, answer=range(n))]))[0] for n in range(20)}
    assert len(drawn) > 15


def test_uniforms_are_uniform_and_uncorrelated():
    steps = uniforms([7] * 20000, list(range(20000)))
    seeds = uniforms(list(range(-10000, 10000)), [3] * 20000)
    for sample in (steps, seeds):
        assert 0 <= sample.min() < sample.max() < 1
        counts = np.histogram(sample, 20, (0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45  # chi-squared, 19 degrees of freedom, p = 0.0007
        assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.03


def reference_kept(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The cuts as sorting would make them, for one row without equal values."""
    probs = torch.softmax(logits.double() / temperature, -1)
    kept = probs >= min_p * probs.max()
    order = probs.argsort(descending=True)
    if top_k:
        kept[order[top_k:]] = False
    left = probs.where(kept, 0) / probs.where(kept, 0).sum()
    before = left[order].cumsum(0) - left[order]
    kept[order[before >= top_p]] = False
    kept[order[0]] = True
    return kept


@pytest.mark.parametrize(
    "cut",
    [
        {"top_k": 1},
        {"top_k": 50},
        {"top_k": 400},
        {"top_p": 0.3},
        {"top_p": 0.97},
        {"top_p": 0.9999, "temperature": 3.0},
        {"min_p": 0.1},
        {"top_k": 30, "top_p": 0.7},
        {"top_k": 500, "top_p": 0.95, "min_p": 0.01, "temperature": 0.7},
        {"top_p": 0.0},
    ],
)
def test_cuts_keep_what_sorting_would_keep(cut):
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB) * 2
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
    cuts = Cuts(**{name: torch.tensor([value] * 4) for name, value in full.items()})
    probs = (logits / cuts.temperature[:, None]).softmax(-1)
    kept = probs >= threshold(probs, cuts)[:, None]
    for row, ours in zip(logits, kept, strict=True):
        assert torch.equal(ours, reference_kept(row, **cut))


def test_draws_follow_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    expected = torch.softmax(logits[0] / 0.8, -1).numpy()
    requests = [request(seed=i, temperature=0.8) for i in range(20000)]
    drawn = tokens(Sampler().sample(logits.expand(20000, -1), requests))
    counts = np.bincount(drawn, minlength=5)
    assert counts[4] == 0
    assert np.abs(counts / 20000 - expected).max() < 0.012


def test_penalties_follow_their_formulas():
    torch.manual_seed(0)
    logits = torch.randn(1, 50)
    r = request(
        prompt=(1, 2),
        answer=(3, 3, 4),
        temperature=0.0,
        repetition_penalty=1.5,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )
    sampler = Sampler()
    edited = sampler._edited(logits, [r])[0]
    expected = logits[0].clone()
    for token in (1, 2, 3, 4):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    expected[3] -= 2 * 0.3 + 0.2
    expected[4] -= 0.3 + 0.2
    assert torch.allclose(edited, expected)
    r.append(4)
    expected[4] -= 0.3
    assert torch.allclose(sampler._edited(logits, [r])[0], expected)


def test_logit_bias_and_min_tokens():
    logits = torch.zeros(1, 10)
    logits[0, 7] = 5.0
    sample = Sampler().sample
    assert tokens(sample(logits, [request(temperature=0.0, logit_bias={3: 8.0})])) == [3]
    assert tokens(sample(logits, [request(temperature=0.0, logit_bias={7: -100.0, 2: 1.0})])) == [2]
    early = request(temperature=0.0, min_tokens=2, stop_ids=(7,), logit_bias={4: 1.0})
    assert tokens(sample(logits, [early])) == [4]
    early.append(4)
    early.append(4)
    assert tokens(sample(logits, [early])) == [7]
    early.append(7)
    assert early.finish_reason == "stop"


def test_logprobs_are_the_models_own():
    torch.manual_seed(0)
    logits = torch.randn(2, 100)
    (token, logprob), (_, none) = Sampler().sample(
        logits, [request(temperature=0.0, logprobs=3, logit_bias={5: 100.0}), request(temperature=0.0)]
    )
    expected = logits[0].log_softmax(-1)
    assert none is None
    assert token == logprob.token_id == 5
    assert math.isclose(logprob.logprob, expected[5], abs_tol=1e-6)
    best = expected.topk(3)
    assert [t for t, _ in logprob.top] == best.indices.tolist()
    assert np.allclose([p for _, p in logprob.top], best.values)
