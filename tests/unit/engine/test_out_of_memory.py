"""A step for which the device has no memory costs the newest request in it, and nobody else."""

import pytest
import torch
from helpers.engine_requests import drain, make_engine, prepared, tokens
from helpers.equal_models import assert_at_rest

from mmserve.core.errors import OutOfMemory
from mmserve.core.messages import TextOutput
from mmserve.generation import checked

SAMPLING = [
    {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 4, "stop_token_ids": (1, 2, 3, 4), "min_tokens": 5},
    {"prompt_logprobs": 1},
    {},
]


@pytest.fixture(params=["off", "on"])
def overlap(request):
    return request.param


def requests(pair):
    prompts = [pair.prompt(5, ("image", 4, 4), 3 + n, seed=n) for n in range(len(SAMPLING))]
    return [prepared(pair, p, str(n), **s) for n, (p, s) in enumerate(zip(prompts, SAMPLING, strict=True))]


@pytest.fixture(scope="module")
def alone(pair):
    found = []
    for request in requests(pair):
        engine = make_engine(pair)
        engine.submit(request)
        found.append(tokens(drain(engine)[request.request_id]))
    return found


class Short:
    """A call for which there is no memory when so many requests want something of it."""

    def __init__(self, call, most, count, after=False):
        self.call, self.most, self.count, self.after = call, most, count, after
        self.failures = 0

    def __call__(self, *args):
        if self.count(*args) <= self.most:
            return self.call(*args)
        self.failures += 1
        if self.after:
            self.call(*args)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def assert_shed(outputs, *names):
    for name in names:
        last = outputs[name][-1]
        assert (last.finish_reason, last.error_code) == ("error", "out_of_memory")
        assert "CUDA" not in last.error


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_forward_without_memory_ends_the_newest_until_it_fits(pair, alone, overlap, most):
    engine = make_engine(pair, overlap=overlap)
    engine.runner.run = Short(engine.runner.run, most, lambda batch, *_: len(batch))
    for request in requests(pair):
        engine.submit(request)
    outputs = drain(engine)
    count = len(SAMPLING)
    assert engine.runner.run.failures == engine.stats()["shed"] == count - most
    assert_shed(outputs, *map(str, range(most, count)))
    assert [tokens(outputs[str(n)]) for n in range(most)] == alone[:most]
    assert_at_rest(engine)


@pytest.mark.parametrize("after", [True, False])
def test_a_draw_without_memory_does_the_same_and_counts_nothing(pair, alone, overlap, after):
    """Also where it had counted tokens already."""
    engine = make_engine(pair, overlap=overlap)
    for name in ("draw", "sample"):
        call = getattr(engine.sampler, name)
        setattr(engine.sampler, name, Short(call, 2, lambda logits, those: len(those), after))
    outputs = {}
    for request in requests(pair)[:2]:
        engine.submit(request)
    for _ in range(3):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for request in requests(pair)[2:]:
        engine.submit(request)
    for name, more in drain(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert_shed(outputs, "2", "3")
    assert [tokens(outputs[str(n)]) for n in range(2)] == alone[:2]
    assert_at_rest(engine)


def test_a_picture_without_memory_ends_the_newest_who_wants_one_of_its_batch(pair, alone, overlap):
    engine = make_engine(pair, overlap=overlap, encoder_tokens=1000)
    encoder = engine.stage.encoder
    short = Short(encoder.parts, 2, lambda pixels, grids: len(pixels))
    engine.stage.encoder = type("Encoder", (), {"parts": staticmethod(short)})
    for request in requests(pair):
        engine.submit(request)
    outputs = drain(engine)
    assert short.failures == 2
    assert_shed(outputs, "2", "3")
    assert [tokens(outputs[str(n)]) for n in range(2)] == alone[:2]
    assert_at_rest(engine)


def test_one_that_never_fits_ends_alone(pair, overlap):
    engine = make_engine(pair, overlap=overlap)
    engine.runner.run = Short(engine.runner.run, 0, lambda batch, *_: len(batch))
    engine.submit(requests(pair)[0])
    assert_shed(drain(engine), "0")
    assert_at_rest(engine)


def test_callers_are_told_to_try_again():
    fields = {"error": OutOfMemory.said, "error_code": OutOfMemory.code}
    output = TextOutput(request_id="r", text="", finish_reason="error", **fields)
    with pytest.raises(OutOfMemory, match="try again") as raised:
        checked(output)
    assert raised.value.status == 503
