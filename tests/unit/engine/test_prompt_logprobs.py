"""Log-probabilities of prompts: transformers' on the same weights, however the prompt is computed."""

import numpy as np
import pytest
from helpers.engine_requests import drain, make_engine, prepared, tokens

from mmserve.core.errors import InvalidRequest
from mmserve.engine.sampling import prompt_scores, scoring
from mmserve.engine.scheduler import request as requests
from mmserve.engine.scheduler.request import Status

CASES = {
    "text": (40,),
    "picture": (5, ("image", 4, 6), 7),
    "pictures and a clip": (2, ("image", 6, 4), 5, ("video", 2, 10, 6), 4),
    "one token": (1,),
}
COUNT = 3


@pytest.fixture(scope="module")
def prompts(pair):
    return {name: pair.prompt(*case, seed=i) for i, (name, case) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def expected(pair, prompts):
    """Float32 log-probabilities [N - 1, vocab] of transformers: what may follow each token but the last."""
    return {
        name: pair.reference_logits(p).float().log_softmax(-1)[: len(p.ids) - 1].numpy()
        for name, p in prompts.items()
    }


def check(told, prompt, expected, count=COUNT):
    ids = np.array(prompt.ids)
    assert np.array_equal(told.token_ids, ids)
    chosen = expected[np.arange(len(ids) - 1), ids[1:]]
    assert np.allclose(told.logprobs, chosen, atol=2e-4)
    assert np.abs(told.ranks - 1 - (expected > chosen[:, None]).sum(-1)).max(initial=0) <= 1
    assert told.top_ids.shape == told.top_logprobs.shape == (len(ids) - 1, count)
    best = np.sort(expected, axis=-1)[:, ::-1][:, :count]
    assert np.allclose(told.top_logprobs, best, atol=2e-4)
    assert np.allclose(np.take_along_axis(expected, told.top_ids.astype(np.int64), -1), best, atol=2e-4)


def told_once(outputs):
    """What the first output of a request tells of its prompt; no other tells anything."""
    first, *others = outputs
    assert all(o.prompt_logprobs is None for o in others)
    return first.prompt_logprobs


@pytest.mark.parametrize("step_tokens", [512, 16, 7, 3])
def test_they_are_those_of_transformers_for_any_chunks_also_under_pictures(
    pair, prompts, expected, step_tokens
):
    engine = make_engine(pair, step_tokens=step_tokens, encoder_tokens=16)
    for name, prompt in prompts.items():
        engine.submit(prepared(pair, prompt, name, prompt_logprobs=COUNT, max_tokens=3))
    outputs = drain(engine)
    for name, prompt in prompts.items():
        check(told_once(outputs[name]), prompt, expected[name])


@pytest.mark.parametrize("count", [0, 1, 20])
def test_there_are_as_many_alternatives_as_were_asked_for(pair, prompts, expected, count):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts["picture"], prompt_logprobs=count, logprobs=1))
    check(told_once(drain(engine)["r"]), prompts["picture"], expected["picture"], count)


def test_who_does_not_ask_is_told_nothing_and_answers_alike_beside_those_who_do(pair, prompts):
    alone = make_engine(pair)
    alone.submit(prepared(pair, prompts["text"]))
    expected = tokens(drain(alone)["r"])
    engine = make_engine(pair, step_tokens=16)
    for name, wanted in (("plain", None), ("asking", 2)):
        engine.submit(prepared(pair, prompts["text"], name, prompt_logprobs=wanted))
    outputs = drain(engine)
    assert all(o.prompt_logprobs is None for o in outputs["plain"])
    assert told_once(outputs["asking"]) is not None
    assert tokens(outputs["plain"]) == tokens(outputs["asking"]) == expected


def test_cached_prefixes_are_not_used_where_their_logits_are_needed_but_are_shared(pair, prompts, expected):
    engine = make_engine(pair, page_size=4)
    for name in ("first", "again"):
        engine.submit(prepared(pair, prompts["picture"], name, prompt_logprobs=COUNT))
        outputs = drain(engine)[name]
        check(told_once(outputs), prompts["picture"], expected["picture"])
        assert outputs[0].cached_tokens == 0
    engine.submit(prepared(pair, prompts["picture"], "other"))
    assert drain(engine)["other"][0].cached_tokens > 0


def test_two_with_one_prompt_do_not_wait_for_each_other(pair, prompts, expected, monkeypatch):
    monkeypatch.setattr(requests, "LOGIT_ROWS", 4)
    engine = make_engine(pair, page_size=4)
    for name in "ab":
        engine.submit(prepared(pair, prompts["text"], name, prompt_logprobs=COUNT))
    engine.step()
    engine.step()
    assert [r.status for r in engine._requests.values()] == [Status.RUNNING] * 2
    outputs = drain(engine)
    for name in "ab":
        check(told_once(outputs[name]), prompts["text"], expected["text"])


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
def test_a_preempted_prompt_is_told_whole_and_once(pair, prompts, expected, steps):
    """Preempted in the middle of its prompt, at its end, and in its answer."""
    engine = make_engine(pair, page_size=4, step_tokens=8, encoder_tokens=64)
    engine.submit(prepared(pair, prompts["picture"], prompt_logprobs=COUNT))
    outputs = []
    for step in range(60):
        outputs += engine.step()
        if step == steps:
            engine.scheduler._preempt(next(iter(engine._requests.values())))
    drain(engine)
    assert engine.stats()["preemptions"] == 1
    assert len(tokens(outputs)) == 12
    check(told_once(outputs), prompts["picture"], expected["picture"])


def test_a_step_holds_the_logits_of_few_rows(pair, prompts, expected, monkeypatch):
    """Of all prompts together; and few of them at once in float32."""
    monkeypatch.setattr(requests, "LOGIT_ROWS", 10)
    monkeypatch.setattr(scoring, "BLOCK_BYTES", 4 * 4 * pair.model.config.text.vocab_size)
    engine = make_engine(pair)
    rows, run = [], engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda batch: _noted(rows, run(batch), batch))
    for name in ("text", "picture"):
        engine.submit(prepared(pair, prompts[name], name, prompt_logprobs=COUNT))
    outputs = drain(engine)
    assert max(rows) == 10
    for name in ("text", "picture"):
        check(told_once(outputs[name]), prompts[name], expected[name])
    assert prompt_scores.LOGIT_ROWS * 151_936 * 2 < 100 << 20


def _noted(rows, logits, batch):
    rows.append(len(logits) - len(batch.sampling))
    return logits


def test_an_abort_in_the_middle_frees_everything(pair, prompts):
    engine = make_engine(pair, step_tokens=8)
    engine.submit(prepared(pair, prompts["text"], prompt_logprobs=COUNT))
    engine.step()
    engine.step()
    assert engine.abort("r").prompt_logprobs is None
    drain(engine)


@pytest.mark.parametrize("count", [-1, 21])
def test_more_alternatives_than_20_are_refused(pair, prompts, count):
    with pytest.raises(InvalidRequest, match="0 to 20") as refused:
        make_engine(pair).submit(prepared(pair, prompts["text"], prompt_logprobs=count))
    assert refused.value.param == "prompt_logprobs"


def test_rows_name_the_tokens_of_a_prompt(pair, prompts):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts["text"], prompt_logprobs=2))
    told = told_once(drain(engine)["r"])
    first, *others = told.rows()
    assert first is None
    assert [row.token_id for row in others] == prompts["text"].ids[1:]
    assert [row.rank for row in others] == told.ranks.tolist()
    assert [len(row.top) for row in others] == [2] * len(others)
