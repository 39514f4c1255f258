"""The sampler by kernels against the plain one: the same noise gives the same tokens."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.asked import SMALL, request, wishes
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.sampling.block import NO_TOKEN
from mmserve.engine.sampling.choose import bytes_at_most, choose_sampling
from mmserve.engine.sampling.draw import Cuts, threshold
from mmserve.engine.sampling.leaders import block_maxima
from mmserve.engine.sampling.noise import uniforms
from mmserve.engine.sampling.sampler import Sampler
from mmserve.models.ops.triton import runtime

DEVICE = torch.device("cpu" if runtime.INTERPRETED else "cuda")
if reason := runtime.unusable(DEVICE):
    pytest.skip(f"Triton cannot run: {reason}", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from mmserve.models.ops.triton import sampling as kernels  # noqa: E402
from mmserve.models.ops.triton.logits import BLOCK, FLOATS, INTS, TILE, edit  # noqa: E402

VOCAB = 3001
FUSED = "triton"


def tokens(sampled):
    return [token for token, _ in sampled]


def both(logits, requests):
    """(by kernels, plain)."""
    return Sampler(FUSED).sample(logits.to(DEVICE), requests), Sampler().sample(logits, requests)


@triton.jit
def noise(seeds, steps, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, kernels.uniform_of(tl.load(seeds + at), tl.load(steps + at)))


def test_noise_is_bit_for_bit_that_of_the_host():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 256, np.uint64)
    steps = rng.integers(0, 1 << 40, 256)
    out = torch.empty(256, dtype=torch.float64, device=DEVICE)
    given = (torch.from_numpy(x.view(np.int64)).to(DEVICE) for x in (seeds, steps))
    noise[(1,)](*given, out, N=256)
    assert out.tolist() == uniforms(seeds, steps).tolist()


@triton.jit
def round_trip(x, keys, back, N: tl.constexpr):
    at = tl.arange(0, N)
    key = kernels.key_of(tl.load(x + at))
    tl.store(keys + at, key)
    tl.store(back + at, kernels.value_of(key))


def test_keys_are_in_the_order_of_their_numbers():
    x = torch.cat([torch.randn(1020) * 10.0 ** torch.randint(-30, 30, (1020,)), torch.tensor([0.0, -0.0])])
    x = torch.cat([x, torch.tensor([math.inf, -math.inf])]).sort().values.to(DEVICE)
    keys, back = torch.empty(1024, dtype=torch.int32, device=DEVICE), torch.empty_like(x)
    round_trip[(1,)](x, keys, back, N=1024)
    assert torch.equal(back, x)
    assert torch.equal(keys[1:] > keys[:-1], x[1:] > x[:-1])
    assert int(keys[0]) == kernels.LEAST_KEY.value


CUTS = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 400},
    {"top_k": VOCAB},
    {"top_k": 10**12},
    {"top_p": 0.3},
    {"top_p": 0.97},
    {"top_p": 0.999, "temperature": 3.0},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 30, "top_p": 0.7},
    {"top_k": 500, "top_p": 0.95, "min_p": 0.01, "temperature": 0.7},
    {"top_p": 0.9, "min_p": 0.2},
    {"top_p": 0.0},
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_same_seeds_draw_the_same_tokens(cut):
    """In bf16 many logits are equal, also at the thresholds."""
    torch.manual_seed(0)
    logits = (torch.randn(2, VOCAB) * 3).bfloat16()
    fused, plain = both(logits, [request(str(i), seed=i, **cut) for i in range(2)])
    assert fused == plain


@triton.jit
def kept_kernel(
    x, maxima, sums, ints, floats, listed, out, width, blocks, vocab,
    BLOCKS: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    most = tl.load(maxima + row * blocks + at, at < blocks, other=float("-inf"))
    top = tl.max(most, 0)
    mass = tl.load(sums + row * blocks + at, at < blocks, other=0.0) * tl.exp(most - top)
    least, _ = kernels.kept_of(
        x + row * width, listed, ints + row * INTS, floats + row * FLOATS, kernels.key_of(most), most,
        tl.sum(mass.to(tl.float64), 0), top, vocab, BLOCKS, PIVOTS, TILE, BLOCK,
    )  # fmt: skip
    tl.store(out + row, kernels.value_of(least))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [c for c in CUTS if {"top_k", "top_p", "min_p"} & c.keys()], ids=str)
def test_exactly_what_the_plain_cuts_leave_stays(cut, dtype):
    torch.manual_seed(2)
    logits = (torch.randn(2, VOCAB) * 2).to(dtype)
    batch = Sampler(FUSED)._made([request(str(i), **cut) for i in range(2)], logits.to(DEVICE))
    work, listed = batch._remembered.room(2)
    edit(logits.to(DEVICE), batch._edits, work)
    out = torch.empty(2, device=DEVICE)
    width = work.logits.shape[1]
    kept_kernel[2,](
        *work, batch._edits.ints, batch._edits.floats, listed, out, width, width // BLOCK, VOCAB,
        BLOCKS=kernels.blocks_in(VOCAB), PIVOTS=kernels.PIVOTS, TILE=TILE, BLOCK=BLOCK,
    )  # fmt: skip
    full = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
    x = logits.float() / full.pop("temperature")
    names = {"top_k": np.int64, "top_p": np.float32, "min_p": np.float32}
    cuts = Cuts(**{name: np.array([min(full[name], 2**31 - 1)] * 2, kind) for name, kind in names.items()})
    plain = torch.from_numpy(threshold(x, block_maxima(x), cuts))
    assert torch.equal(x >= out.cpu()[:, None], x >= plain[:, None])


@pytest.mark.parametrize("top_p", [0.75, 0.95])
def test_of_equal_logits_at_the_threshold_only_so_many_have_a_share_of_the_mass(top_p):
    """One at 2 and hundreds at 0, of which top-k leaves two a place: with 0.75 of their mass the first one is
    enough, with 0.95 all are drawn from."""
    logits = torch.zeros(1, 300)
    logits[0, 200] = 2.0
    asked = [request(str(i), seed=i, top_k=3, top_p=top_p) for i in range(8)]
    fused, plain = both(logits.expand(8, -1), asked)
    assert fused == plain
    assert (set(tokens(fused)) == {200}) == (top_p == 0.75)


@pytest.mark.parametrize("shape", ["flat", "equal", "steep", "one", "few"])
@pytest.mark.parametrize(
    "cut", [{"top_p": 0.9}, {"top_k": 7}, {"top_k": 7, "top_p": 0.5}, {"min_p": 0.5}, {}], ids=str
)
def test_odd_distributions_are_drawn_from_alike(shape, cut):
    torch.manual_seed(1)
    logits = {
        "flat": torch.randn(2, VOCAB) * 1e-3,
        "equal": torch.zeros(2, VOCAB),
        "steep": torch.randn(2, VOCAB) * 60,
        "one": torch.full((2, VOCAB), -torch.inf).index_fill(1, torch.tensor([2999]), -80.0),
        "few": torch.full((2, VOCAB), -torch.inf).index_fill(1, torch.tensor([0, 127, 128, 2100, 3000]), 2.0),
    }[shape]
    fused, plain = both(logits, [request(str(i), seed=i, **cut) for i in range(2)])
    assert fused == plain


@pytest.mark.parametrize("vocab", [1, 5, 128, 2048, 2049])
def test_vocabularies_of_any_size(vocab):
    torch.manual_seed(vocab)
    asked = [request(str(i), seed=i, **cut) for i, cut in enumerate([{}, {"top_p": 0.8}, {"top_k": 3}])]
    fused, plain = both(torch.randn(3, vocab), asked)
    assert fused == plain


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "cut", [{}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0, "logprobs": 0}], ids=str
)
def test_broken_logits_still_give_a_token_of_the_vocabulary(value, cut):
    logits = torch.full((1, 300), value, device=DEVICE)
    [(token, _)] = Sampler(FUSED).sample(logits, [request(**cut)])
    assert 0 <= token < 300


@settings(deadline=None, max_examples=12)
@given(
    asked=st.lists(wishes, min_size=1, max_size=5),
    comings=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=5, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_whatever_is_wished_step_by_step_it_is_as_in_the_plain_form(asked, comings, dtype):
    """Penalties, biases, bad words, what is allowed, ends held back, log-probabilities; some rows a step."""
    fused, plain = Sampler(FUSED), Sampler()
    requests = [request(str(i), **wish) for i, wish in enumerate(asked)]
    twins = [request(str(i), **wish) for i, wish in enumerate(asked)]
    ended = set()
    torch.manual_seed(0)
    for step, coming in enumerate(comings):
        rows = [i for i in range(len(asked)) if coming[i] and i not in ended]
        if not rows:
            continue
        logits = (torch.randn(len(rows), SMALL) * 3).to(dtype)
        found = fused.sample(logits.to(DEVICE), [requests[i] for i in rows])
        wanted = plain.sample(logits, [twins[i] for i in rows])
        for i, (token, told), (other, other_told) in zip(rows, found, wanted, strict=True):
            assert token == other, (step, i)
            assert_told(told, other_told)
            for one in (requests[i], twins[i]) if token != NO_TOKEN else ():
                one.append(token)
            if requests[i].finish_reason or token == NO_TOKEN:
                ended.add(i)
                fused.forget(requests[i])
        fused.check_integrity([r for i, r in enumerate(requests) if i not in ended])


def assert_told(found, wanted):
    """One log-probability and the likeliest ones; of equal ones any may be named."""
    if wanted is None:
        assert found is None
        return
    assert found.token_id == wanted.token_id
    assert math.isclose(found.logprob, wanted.logprob, abs_tol=1e-5)
    assert np.allclose([p for _, p in found.top], [p for _, p in wanted.top], atol=1e-5)


def test_log_probabilities_are_the_models_own():
    torch.manual_seed(0)
    logits = torch.randn(2, 100)
    fused, plain = both(
        logits, [request("a", temperature=0.0, logprobs=3, logit_bias={5: 100.0}), request("b", top_k=1)]
    )
    assert fused[1] == plain[1]
    assert fused[0][0] == 5
    assert_told(fused[0][1], plain[0][1])
    assert [t for t, _ in fused[0][1].top] == [t for t, _ in plain[0][1].top]


class Odd:
    """A form that lets odd tokens through alone, and lets the answer go after three."""

    complete = free = fault = None

    def __init__(self):
        self.taken = 0

    def allow(self, row):
        row[:] = np.int32(-0x55555556)

    def accept(self, token):
        assert token % 2
        self.taken += 1
        self.free = self.taken == 3


def test_forms_of_answers_are_kept_and_end_tokens_held_back_meanwhile():
    torch.manual_seed(0)
    sampler, asked = Sampler(FUSED), request(seed=1, min_tokens=2, stop_ids=(7, 9))
    asked.steering = Odd()
    free = request("free", seed=2)
    logits = torch.full((2, 30), -10.0)
    logits[0, [7, 8, 9]] = 10.0
    found = []
    for _ in range(5):
        (token, _), (other, _) = sampler.sample(logits.to(DEVICE), [asked, free])
        asked.append(token)
        free.append(other)
        found.append(token)
        if asked.finish_reason:
            break
    assert all(t % 2 and t not in (7, 9) for t in found[:2])
    assert found[2] in (7, 9)


def test_a_batch_that_stays_the_same_asks_its_requests_nothing(monkeypatch):
    logits = torch.randn(3, 300, device=DEVICE)
    kinds = [{"top_p": 0.9}, {"temperature": 0.0, "presence_penalty": 0.5}, {"bad": ((1, 2), (3,))}]
    asked = [request(str(i), **kind) for i, kind in enumerate(kinds)]
    sampler = Sampler(FUSED)
    for (token, _), one in zip(sampler.sample(logits, asked), asked, strict=True):
        one.append(token)
    for name in ("prepared", "num_generated", "may_end", "token_ids"):
        monkeypatch.setattr(type(asked[0]), name, property(lambda _: pytest.fail("a request was asked")))
    sampler.draw(logits, asked)


def test_rows_ahead_of_the_hosts_knowledge_are_as_if_it_knew():
    """Draws that nobody reads in between: penalties and bad words go by what stands on the device."""
    torch.manual_seed(0)
    wishes = [
        {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"seed": 1, "bad": ((1, 2), (2, 2), (0, 1, 0))},
        {"seed": 2, "top_p": 0.9, "presence_penalty": 1.0},
    ]
    ahead = [request(str(i), **w) for i, w in enumerate(wishes)]
    known = [request(str(i), **w) for i, w in enumerate(wishes)]
    sampler, plain = Sampler(FUSED), Sampler()
    assert not sampler.needs_words(ahead)
    logits = [torch.randn(3, 4) for _ in range(18)]
    drawn = [sampler.draw(x.to(DEVICE), ahead) for x in logits]
    for x, step in zip(logits, drawn, strict=True):
        wanted = plain.sample(x, known)
        assert step.ids.tolist() == tokens(wanted)
        assert step.results(*(copy.cpu().numpy() for copy in step.copies)) == wanted
        for one, (token, _) in zip(known, wanted, strict=True):
            one.append(token)


def test_bad_words_are_never_finished_however_long_the_answer_gets():
    """Beyond the room that texts have at first."""
    torch.manual_seed(3)
    sampler, asked = Sampler(FUSED), request(seed=5, bad=((0, 0), (1, 2, 1)), prompt=(1, 2))
    ids = [sampler.draw(torch.zeros(1, 3, device=DEVICE), [asked]).ids for _ in range(80)]
    said = [1, 2, *torch.cat(ids).tolist()]
    assert (0, 0) not in pairwise(said)
    assert (1, 2, 1) not in zip(said, said[1:], said[2:], strict=False)
    assert sampler._history.texts.table.shape[1] > 64


def test_a_large_batch_is_worked_on_in_parts_of_one_answer(monkeypatch):
    torch.manual_seed(0)
    logits = torch.randn(10, 300)
    kinds = [{}, {"top_p": 0.8}, {"temperature": 0.0, "repetition_penalty": 1.3}, {"temperature": 0.0}]
    asked = [request(str(i), seed=i, logprobs=2, **kinds[i % 4]) for i in range(10)]
    whole = Sampler(FUSED).sample(logits.to(DEVICE), asked)
    sampler = Sampler(FUSED)
    from mmserve.engine.sampling import fused, remembered

    monkeypatch.setattr(remembered, "WORK_BYTES", 3 * 4 * 2048)
    monkeypatch.setattr(fused, "BLOCK_BYTES", 3 * 4 * 300)
    assert sampler.sample(logits.to(DEVICE), asked) == whole
    assert sampler._history.room(1)[0].logits.shape[0] == 1
    assert sampler._history.most_rows == 3


def test_no_more_memory_is_held_than_is_told():
    sampler = Sampler(FUSED)
    for count in (1, 3, 4, 9, 20):
        asked = [request(str(i), frequency_penalty=0.1, seed=i) for i in range(count)]
        sampler.sample(torch.zeros(count, 300, device=DEVICE), asked)
        history = sampler._history
        held = [*history.room(count)[0], history.room(count)[1], history.counts.table]
        assert sum(x.untyped_storage().nbytes() for x in held) <= bytes_at_most(FUSED, 300, count)
        for one in asked:
            sampler.forget(one)


def test_where_triton_runs_the_sampler_is_fused_and_where_not_it_is_said(monkeypatch):
    assert choose_sampling(torch.device("cpu"))[0] == "torch"
    monkeypatch.setattr(runtime, "unusable", lambda device: None)
    assert choose_sampling(torch.device("cuda"))[0] == "triton"
    monkeypatch.setattr(runtime, "unusable", lambda device: "no triton here")
    form, why = choose_sampling(torch.device("cuda"))
    assert form == "torch"
    assert "no triton here" in why
