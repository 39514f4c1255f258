import math

import numpy as np
import pytest
import torch
from helpers.asked import SMALL, request, wishes, words
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.sampling import batch, report
from mmserve.engine.sampling.block import NO_TOKEN
from mmserve.engine.sampling.draw import Cuts, threshold
from mmserve.engine.sampling.greedy import greedy
from mmserve.engine.sampling.leaders import block_maxima, leaders
from mmserve.engine.sampling.noise import uniforms
from mmserve.engine.sampling.sampler import Sampler
from mmserve.engine.scheduler.request import Request

VOCAB = 3000


def tokens(sampled):
    return [token for token, _ in sampled]


def test_greedy_takes_the_largest_logit():
    logits = torch.randn(5, VOCAB, dtype=torch.bfloat16)
    requests = [request(temperature=0.0) for _ in range(5)]
    assert tokens(Sampler().sample(logits, requests)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shift", [-50.0, 0.0, 50.0])
def test_the_search_for_the_largest_is_exact(dtype, shift):
    """Against torch's own, for rows of negative numbers alone too; of equal ones the first is taken."""
    torch.manual_seed(0)
    logits = (torch.randn(20, VOCAB) + shift).to(dtype)
    logits[3:6] = -torch.inf
    logits[4, 17] = -7.0
    logits[5, 17] = 7.0
    assert greedy(logits).tolist() == logits.float().argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 300, 1000, 5003, 151_936])
@pytest.mark.parametrize("count", [0, 1, 20, 700])
def test_leaders_are_those_of_a_sort(vocab, count):
    torch.manual_seed(vocab)
    x = torch.randn(3, vocab).bfloat16().float()
    x[1, : vocab // 2] = -torch.inf
    values, ids = leaders(x, count)
    expected, order = x.sort(dim=-1, descending=True, stable=True)
    assert np.array_equal(values, expected[:, :count])
    there = values > -math.inf
    assert np.array_equal(ids[there], order[:, :count].numpy()[there])


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
    count = np.arange(20000)
    steps = uniforms(np.full(20000, 7, np.uint64), count)
    seeds = uniforms((count - 10000).astype(np.uint64), np.full(20000, 3))
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
    x = logits / full.pop("temperature")
    cuts = Cuts(**{name: np.array([value] * 4) for name, value in full.items()})
    kept = x >= torch.from_numpy(threshold(x, block_maxima(x), cuts))[:, None]
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


def edited(sampler, logits, request):
    """What the sampler makes of one row of logits before it chooses."""
    block = sampler._made([request], logits)._blocks[0]
    work = logits.clone()
    for edit in block._edits:
        edit.apply(work)
    return work[0]


def penalised(logits, request):
    """The formulas, token by token."""
    p, row = request.prepared.sampling, logits.double()
    answer = request.generated().tolist()
    for token in {*request.token_ids[: request.num_tokens].tolist()}:
        row[token] = (
            row[token] / p.repetition_penalty if row[token] > 0 else row[token] * p.repetition_penalty
        )
    for token in set(answer):
        row[token] -= answer.count(token) * p.frequency_penalty + p.presence_penalty
    return row.float()


PENALTIES = {"repetition_penalty": 1.5, "frequency_penalty": 0.3, "presence_penalty": 0.2}


@pytest.mark.parametrize("chosen", [*({name: value} for name, value in PENALTIES.items()), PENALTIES])
def test_penalties_follow_their_formulas(chosen):
    torch.manual_seed(0)
    sampler, asked = Sampler(), request(prompt=(1, 2, 2), temperature=0.0, **chosen)
    for step in range(100):
        logits = torch.randn(1, 50)
        assert torch.allclose(edited(sampler, logits, asked), penalised(logits[0], asked), atol=1e-5)
        [(token, _)] = sampler.sample(logits, [asked])
        assert token == int(penalised(logits[0], asked).argmax()), step
        if step < 99:
            asked.append(token)


def test_logit_bias_and_min_tokens():
    logits = torch.zeros(1, 10)
    logits[0, 7] = 5.0
    sample = Sampler().sample
    assert tokens(sample(logits, [request(temperature=0.0, logit_bias={3: 8.0})])) == [3]
    assert tokens(sample(logits, [request(temperature=0.0, logit_bias={7: -100.0, 2: 1.0})])) == [2]
    early = request(temperature=0.0, min_tokens=2, stop_ids=(7,), logit_bias={4: 1.0})
    sampler = Sampler()
    for expected in (4, 4, 7):
        assert tokens(sampler.sample(logits, [early])) == [expected]
        early.append(expected)
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


@settings(deadline=None, max_examples=150)
@given(
    asked=st.lists(wishes, min_size=1, max_size=7),
    comings=st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=6, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_whoever_else_is_in_the_batch_a_row_is_as_it_is_alone(asked, comings, dtype):
    """Each step some of the requests are there; each has a sampler of its own beside the common one."""
    together, alone = Sampler(), [Sampler() for _ in asked]
    requests = [request(str(i), **wish) for i, wish in enumerate(asked)]
    twins = [request(str(i), **wish) for i, wish in enumerate(asked)]
    ended = set()
    torch.manual_seed(0)
    for step, coming in enumerate(comings):
        rows = [i for i in range(len(asked)) if coming[i] and i not in ended]
        if not rows:
            continue
        logits = (torch.randn(len(rows), SMALL) * 3).to(dtype)
        found = together.sample(logits, [requests[i] for i in rows])
        for row, (i, sampled) in enumerate(zip(rows, found, strict=True)):
            assert alone[i].sample(logits[row : row + 1], [twins[i]]) == [sampled], (step, i)
            for one in (requests[i], twins[i]) if sampled[0] != NO_TOKEN else ():
                one.append(sampled[0])
            if requests[i].finish_reason or sampled[0] == NO_TOKEN:
                ended.add(i)
                together.forget(requests[i])
        together.check_integrity([r for i, r in enumerate(requests) if i not in ended])


@settings(deadline=None, max_examples=100)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    bad=words(st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_a_bad_word_is_never_finished(prompt, bad, seed):
    sampler, asked = Sampler(), request(prompt=tuple(prompt), bad=bad, temperature=1.0, seed=seed)
    for _ in range(20):
        said = asked.token_ids[: asked.num_tokens].tolist()
        barred = {
            w[-1] for w in bad if tuple(said[len(said) - len(w) + 1 :]) == w[:-1] and len(said) >= len(w) - 1
        }
        work = edited(sampler, torch.zeros(1, 5), asked) if bad else torch.zeros(5)
        assert {i for i in range(5) if work[i] == -torch.inf} == barred
        [(token, _)] = sampler.sample(torch.zeros(1, 5), [asked])
        assert token not in barred
        asked.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.5}])
def test_what_is_forbidden_to_all_but_one_leaves_this_one(temperature, cut):
    logits = torch.full((1, 151_936), -torch.inf)
    logits[0, 151_935] = -80.0
    assert tokens(Sampler().sample(logits, [request(temperature=temperature, **cut)])) == [151_935]
    only = request(temperature=temperature, allowed_token_ids=(77,), **cut)
    assert tokens(Sampler().sample(torch.randn(1, 151_936), [only])) == [77]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.5}])
@pytest.mark.parametrize(
    "wish", [{"bad": ((77,),)}, {"min_tokens": 1, "stop_ids": {77}}, {"bad": ((77,),), "logprobs": 2}]
)
def test_where_every_token_is_forbidden_none_is_chosen(wish, temperature, cut):
    barred = request("barred", temperature=temperature, allowed_token_ids=(77,), **wish, **cut)
    other = request("other", temperature=temperature, allowed_token_ids=(78,), **cut)
    assert tokens(Sampler().sample(torch.randn(2, VOCAB), [barred, other])) == [NO_TOKEN, 78]


def test_a_large_batch_is_worked_on_in_blocks_of_one_answer(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(20, VOCAB)
    kinds = [{}, {"top_p": 0.8}, {"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.0}]
    asked = [request(str(i), seed=i, logprobs=2, **kinds[i % 4]) for i in range(20)]
    whole = Sampler().sample(logits, asked)
    monkeypatch.setitem(batch.BLOCK_BYTES, "cpu", 3 * 4 * VOCAB)
    monkeypatch.setattr(report, "BLOCK_BYTES", 3 * 4 * VOCAB)
    assert Sampler().sample(logits, asked) == whole
    assert Sampler()._made(asked, logits)._buffer.shape == (3, VOCAB)


def test_a_batch_that_stays_the_same_asks_its_requests_nothing(monkeypatch):
    """As long as the same requests come, no Python runs for each of them."""
    logits = torch.randn(3, VOCAB)
    kinds = [{"top_p": 0.9}, {"temperature": 0.0, "presence_penalty": 0.5}, {"temperature": 0.0}]
    asked = [request(str(i), **kind) for i, kind in enumerate(kinds)]
    sampler = Sampler()
    for (token, _), one in zip(sampler.sample(logits, asked), asked, strict=True):
        one.append(token)
    for name in ("prepared", "num_generated", "may_end", "steering", "token_ids"):
        monkeypatch.setattr(Request, name, property(lambda _: pytest.fail("a request was asked")))
    sampler.sample(logits, asked)
