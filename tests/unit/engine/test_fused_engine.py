"""An engine over fused kernels answers as one over the plain forms, whoever comes and goes."""

from types import SimpleNamespace

import pytest
from helpers.engine_requests import drain, make_engine, prepared

from mmserve.core.config import ModelOptions
from mmserve.engine.sampling.sampler import Sampler
from mmserve.models import registry as models
from mmserve.models.ops.registry import triton_ops
from mmserve.models.ops.triton import runtime

pytestmark = pytest.mark.skipif(
    not runtime.INTERPRETED, reason="the model of the helpers lives on a CPU, where kernels are interpreted"
)
WISHES = [
    {},
    {"temperature": 1.0, "seed": 1, "top_p": 0.9, "max_tokens": 3},
    {"temperature": 0.8, "seed": 2, "top_k": 5, "repetition_penalty": 1.3, "logprobs": 2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "max_tokens": 4},
    {"temperature": 1.2, "seed": 3, "logit_bias": {7: 3.0}, "min_tokens": 4, "stop_token_ids": (7, 8)},
    {"temperature": 1.0, "seed": 4, "allowed_token_ids": (4, 5, 6, 7)},
]


def answers(pair, form, **options):
    """Tokens, log-probabilities and how it ended, of each request; there is room for four at once."""
    engine = make_engine(pair, max_running=4, **options)
    engine.sampler = Sampler(form)
    for i, wish in enumerate(WISHES):
        prompt = pair.prompt(3 + i, ("image", 2, 4), 2) if i % 2 else pair.prompt(4 + i)
        engine.submit(prepared(pair, prompt, str(i), **{"max_tokens": 5, **wish}))
    return {name: list(map(_said, outputs)) for name, outputs in drain(engine).items()}


def _said(output):
    told = [(round(p.logprob, 3), [round(v, 3) for _, v in p.top]) for p in output.logprobs or ()]
    return output.token_ids, told, output.finish_reason


@pytest.fixture(scope="module")
def plain(pair):
    found = answers(pair, "torch")
    assert len({str(said) for said in found.values()}) == len(WISHES)
    return found


def test_answers_are_those_of_the_plain_sampler(pair, plain):
    assert answers(pair, "triton") == plain


def test_steps_in_flight_are_drawn_without_the_hosts_knowing_the_last_tokens(pair, plain):
    """Penalties, ends held back and draws of step N + 1 before the results of step N were handled."""
    assert answers(pair, "triton", overlap="on") == plain


def test_answers_of_all_that_runs_on_a_gpu_are_those_of_the_plain_forms(pair, plain, monkeypatch):
    """Kernels in both towers, keys and values stored as they are rotated, attention and sampler."""
    monkeypatch.setattr(models, "choose_ops", lambda *_: triton_ops())
    model = models.load_model(ModelOptions(model=str(pair.folder), dtype="float32"))
    fused = SimpleNamespace(**vars(pair), prompt=pair.prompt, positions=pair.positions)
    fused.model = model
    assert answers(fused, "triton", attention_backend="triton") == plain
