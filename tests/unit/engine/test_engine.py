"""The whole engine on a tiny random Qwen3-VL: what must never change an answer, and what must be freed."""

import math
import time

import pytest
import torch
from helpers.engine_requests import drain, generate, make_engine, prepared, tokens
from msgspec.structs import replace

from mmserve.core.errors import ConfigError, ContextLengthExceeded, InvalidRequest, MediaError, Overloaded
from mmserve.engine.attention.reference import ReferenceAttention

CASES = [
    (9,),
    (5, ("image", 4, 6), 7),
    (4, ("image", 8, 4), 3, ("image", 10, 18), 5),
    (6, ("video", 3, 4, 8), 6),
    (2, ("image", 6, 4), 5, ("video", 2, 10, 6), 4, ("image", 4, 4), 3),
    (40,),
    (1, ("image", 2, 2), 2),
    (3, ("image", 6, 22), 4),
]


@pytest.fixture(scope="module")
def prompts(pair):
    return [pair.prompt(*case, seed=i) for i, case in enumerate(CASES)]


@pytest.fixture(scope="module")
def alone(pair, prompts):
    """The answer to each prompt by itself."""
    return [generate(pair, [prompt])[0] for prompt in prompts]


def test_eight_at_once_answer_as_one_at_a_time(pair, prompts, alone):
    assert generate(pair, prompts) == alone


def test_the_attention_backend_asked_for_is_the_one_that_runs(pair, prompts, alone):
    engine = make_engine(pair, attention_backend="reference")
    assert isinstance(engine.runner.attention, ReferenceAttention)
    assert generate(pair, prompts[:2], attention_backend="reference") == alone[:2]


@pytest.fixture(scope="module")
def small(pair):
    """Short prompts, and their answers from prefills that were not cut."""
    cases = [(3, ("image", 4, 4), 2), (1, ("video", 2, 2, 4), 1, ("image", 2, 4), 2)]
    prompts = [pair.prompt(*case, seed=i) for i, case in enumerate(cases)]
    return prompts, generate(pair, prompts, max_tokens=5)


@pytest.mark.parametrize(
    ("step_tokens", "page_size"), [(1, 16), (2, 16), (3, 1), (4, 3), (5, 16), (7, 1), (9, 3), (11, 16)]
)
def test_prompts_cut_anywhere_also_inside_pictures_answer_as_whole(pair, small, step_tokens, page_size):
    prompts, answers = small
    options = {"step_tokens": step_tokens, "page_size": page_size}
    assert generate(pair, prompts, max_tokens=5, **options) == answers


def test_preempted_and_resumed_answer_as_undisturbed(pair):
    prompts = [pair.prompt(40, ("image", 4, 4), 10, seed=i) for i in range(3)]
    undisturbed = generate(pair, prompts)
    engine = make_engine(pair, page_size=1)
    _leave_pages(engine, 150)
    for i, prompt in enumerate(prompts):
        engine.submit(prepared(pair, prompt, str(i), max_tokens=40))
    outputs = drain_with_pages_taken(engine)
    assert engine.stats()["preemptions"] > 0
    assert [tokens(outputs[str(i)])[:12] for i in range(3)] == undisturbed


def _leave_pages(engine, count):
    pages = engine.kv.allocator
    engine.scheduler.taken = pages.allocate(pages.free - count)


def drain_with_pages_taken(engine):
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    engine.kv.allocator.release(engine.scheduler.taken)
    engine.check_integrity()
    return outputs


def test_a_request_that_forbids_every_token_ends_alone_and_says_so(pair, prompts, alone):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts[1], "other"))
    engine.submit(
        replace(
            prepared(pair, prompts[0], "barred", allowed_token_ids=(5, 6)), bad_words=((5, 6), (6, 6), (5,))
        )
    )
    outputs = drain(engine)
    assert tokens(outputs["other"]) == alone[1]
    assert tokens(outputs["barred"]) == [6]
    last = outputs["barred"][-1]
    assert (last.finish_reason, last.error_code) == ("error", "no_token_allowed")
    assert "forbid every token" in last.error


def test_one_picture_in_many_requests_is_encoded_once(pair):
    engine = make_engine(pair)
    prompt = pair.prompt(5, ("image", 4, 6), 7)
    for i in range(5):
        engine.submit(prepared(pair, prompt, str(i)))
    outputs = drain(engine)
    assert engine.stats()["encoded_items"] == 1
    assert len({tuple(tokens(o)) for o in outputs.values()}) == 1


def test_a_clip_larger_than_the_encoder_pool_passes_through_it(pair, alone, prompts):
    engine = make_engine(pair, encoder_tokens=8)
    engine.stage.pool.capacity_bytes = pair.model.vision_token_bytes * 16
    engine.submit(prepared(pair, prompts[3]))
    engine.submit(prepared(pair, prompts[3], "second"))
    outputs = drain(engine)
    assert tokens(outputs["r"]) == tokens(outputs["second"]) == alone[3]
    assert engine.stage.pool.evictions > 0


def test_a_deadline_that_passed_before_the_first_token_ends_the_request_and_no_other(pair, alone, prompts):
    engine = make_engine(pair)
    engine.submit(replace(prepared(pair, prompts[0], "late"), deadline=time.monotonic() - 1))
    engine.submit(replace(prepared(pair, prompts[1], "in time"), deadline=time.monotonic() + 600))
    outputs = drain(engine)
    [late] = outputs["late"]
    assert (late.finish_reason, late.error_code, late.token_ids) == ("error", "deadline_exceeded", ())
    assert "deadline" in late.error
    assert tokens(outputs["in time"]) == alone[1]
    assert engine.stats()["expired"] == 1
    engine.check_integrity()


@pytest.mark.parametrize("steps", range(8))
def test_an_abort_at_any_moment_frees_everything(pair, prompts, steps):
    engine = make_engine(pair, step_tokens=12, encoder_tokens=8)
    for i in (3, 4):
        engine.submit(prepared(pair, prompts[i], str(i), max_tokens=4))
    for _ in range(steps):
        engine.step()
    last = [engine.abort(str(i)) for i in (3, 4)]
    assert all(o is None or o.finish_reason == "abort" for o in last)
    assert not engine.has_work
    assert engine.step() == []
    drain(engine)


def test_a_request_answers_alike_while_others_come_and_go(pair, prompts, alone):
    engine = make_engine(pair, step_tokens=16, encoder_tokens=8)
    engine.submit(prepared(pair, prompts[2], "kept"))
    outputs = []
    for i in range(30):
        engine.submit(prepared(pair, prompts[i % 8], f"other {i}", max_tokens=3 + i % 5))
        outputs += [o for o in engine.step() if o.request_id == "kept"]
        if i % 3 == 0:
            engine.abort(f"other {i // 2}")
        engine.check_integrity()
    drain(engine)
    assert tokens(outputs) == alone[2]


def test_seeded_sampling_holds_under_batching(pair, prompts):
    def sampled(names, **options):
        engine = make_engine(pair, **options)
        for i in names:
            engine.submit(prepared(pair, prompts[i], str(i), temperature=1.0, top_p=0.95, seed=i))
        outputs = drain(engine)
        return [tokens(outputs[str(i)]) for i in names]

    together = sampled(range(5), step_tokens=32)
    assert together == [sampled([i])[0] for i in range(5)]
    assert len(set(map(tuple, together))) == 5


def test_the_last_output_says_why_and_how_long(pair, prompts):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts[1], max_tokens=3))
    *earlier, last = drain(engine)["r"]
    assert [o.finish_reason for o in earlier] == [None, None]
    assert (last.finish_reason, last.prompt_tokens) == ("length", len(prompts[1].ids))
    t = last.timings
    assert t.arrived <= t.encoded <= t.first_token <= t.finished
    assert t.arrived <= t.scheduled <= t.first_token


def test_stop_tokens_end_an_answer_unless_it_is_too_early(pair, prompts, alone):
    stop = alone[0][3]
    cut = alone[0].index(stop) + 1
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts[0], stop_token_ids=(stop,)))
    outputs = drain(engine)["r"]
    assert tokens(outputs) == alone[0][:cut]
    assert outputs[-1].finish_reason == "stop"
    engine.submit(prepared(pair, prompts[0], stop_token_ids=(stop,), min_tokens=8))
    assert stop not in tokens(drain(engine)["r"])[:8]


def test_logprobs_come_with_their_tokens(pair, prompts):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts[0], logprobs=2))
    for output in drain(engine)["r"]:
        (logprob,) = output.logprobs
        assert logprob.token_id == output.token_ids[0] == logprob.top[0][0]
        assert logprob.logprob == pytest.approx(logprob.top[0][1])


def test_requests_that_cannot_fit_are_refused_with_the_counts(pair, prompts):
    engine = make_engine(pair, max_model_len=64)
    with pytest.raises(
        ContextLengthExceeded, match=r"9 tokens and max_tokens asks for 60 more, 69 in all.*64"
    ):
        engine.submit(prepared(pair, prompts[0], max_tokens=60))
    with pytest.raises(ContextLengthExceeded, match="no room"):
        engine.submit(prepared(pair, pair.prompt(64)))
    engine.submit(prepared(pair, prompts[0], max_tokens=None))
    assert len(tokens(drain(engine)["r"])) == 64 - 9


def test_too_long_for_its_pictures_says_how_many_tokens_they_take(pair, prompts):
    engine = make_engine(pair, max_model_len=16)
    request = prepared(pair, pair.prompt(5, ("image", 4, 8), 7), max_tokens=1)
    with pytest.raises(ContextLengthExceeded, match=r"\(8 of them for pictures and clips\).*max_pixels"):
        engine.submit(request)


def test_wrong_sampling_is_refused_with_the_field(pair, prompts):
    engine = make_engine(pair)
    for field, value in {
        "top_p": 1.5,
        "logit_bias": {9999: 1.0},
        "temperature": -1.0,
        "logprobs": 50,
        "presence_penalty": math.nan,
        "frequency_penalty": math.inf,
        "repetition_penalty": 1e-300,
    }.items():
        with pytest.raises(InvalidRequest) as caught:
            engine.submit(prepared(pair, prompts[0], **{field: value}))
        assert caught.value.param == field
    assert not engine.has_work


def test_a_picture_beyond_the_encoder_pool_is_refused(pair, prompts):
    engine = make_engine(pair)
    engine.stage.pool.capacity_bytes = pair.model.vision_token_bytes * 4
    with pytest.raises(MediaError):
        engine.submit(prepared(pair, prompts[1]))


def test_the_queue_is_bounded(pair, prompts):
    engine = make_engine(pair, max_waiting=2)
    for name in "ab":
        engine.submit(prepared(pair, prompts[0], name))
    with pytest.raises(Overloaded):
        engine.submit(prepared(pair, prompts[0], "c"))
    drain(engine)


def test_a_pool_smaller_than_the_promised_context_is_a_configuration_error(pair):
    with pytest.raises(ConfigError, match="kv_cache_mib"):
        make_engine(pair, kv_cache_mib=1, max_model_len=4000)


def test_a_failing_step_ends_its_requests_and_the_engine_lives_on(pair, prompts, alone, monkeypatch):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts[1], "poor"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", _broken)
        (output,) = engine.step()
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: out of luck")
    engine.submit(prepared(pair, prompts[1], "next"))
    assert tokens(drain(engine)["next"]) == alone[1]


def test_a_picture_that_breaks_the_encoder_ends_its_owner_only(pair, prompts, alone, monkeypatch):
    engine = make_engine(pair)
    engine.submit(prepared(pair, prompts[0], "text"))
    engine.step()
    engine.submit(prepared(pair, prompts[1], "poor"))
    with monkeypatch.context() as patch:
        patch.setattr(engine.stage.encoder, "parts", _broken)
        outputs = drain(engine)
    assert [o.finish_reason for o in outputs["poor"]] == ["error"]
    assert tokens(outputs["text"]) == alone[0][1:]


def _broken(*args):
    raise RuntimeError("out of luck")


def test_bf16_batches_run_in_one_pool(tmp_path):
    from helpers.qwen_pairs import Pair

    pair = Pair("qwen3_vl", tmp_path, dtype="bfloat16")
    prompts = [pair.prompt(*case, seed=i) for i, case in enumerate(CASES)]
    answers = generate(pair, prompts)
    assert all(len(answer) == 12 for answer in answers)
    assert generate(pair, prompts) == answers
    assert torch.is_grad_enabled()
