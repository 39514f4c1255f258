"""The KV pool of a GPU: what is left when everything else is at its worst."""

from contextlib import suppress

import pytest
import torch
from helpers.engine_requests import drain, prepared, tokens
from helpers.late_device import LateDevice

from mmserve.core.config import Config
from mmserve.core.errors import ConfigError
from mmserve.engine import engine as engines
from mmserve.engine.engine import Engine
from mmserve.engine.making import attention_over, kv_pool
from mmserve.engine.runner.memory import MOST_SLOTS, MemoryPlan, Profile, pages_left, shape_of

GIB = 1 << 30
PLAN = MemoryPlan(
    total=10 * GIB,
    limit=9 * GIB,
    taken=4 * GIB,
    steps=GIB // 2,
    pictures=GIB // 2,
    features=GIB,
    sampler=GIB // 2,
    graphs=GIB // 2,
)


class Card(LateDevice):
    """A device of ``total`` bytes, of which ``held`` are taken; each thing measured takes ``each``. Copies
    happen at once."""

    def __init__(self, total, held=0, each=0):
        super().__init__()
        self.total, self.held, self.each = total, held, each
        self.measured = 0

    def copy(self, target, source):
        target.copy_(source)

    def total_memory(self):
        return self.total

    def free_memory(self):
        return self.total - self.held

    def peak(self, work):
        work()
        self.measured += 1
        return self.each

    def capture(self, forward, family="steps"):
        self._costs.graphs += 1
        self._costs.nbytes += self.each
        return super().capture(forward, family)


def profile(pair, card, encoder_tokens=16, **options):
    config = Config.of(**{"step_tokens": 40, "max_running": 4, "encoder_cache_mib": 1, **options})
    attend = lambda pool: attention_over(pool, pair.model, config, 128)  # noqa: E731
    return Profile(pair.model, config, card, card, attend, encoder_tokens)


def test_what_is_left_is_the_pools():
    assert PLAN.kv == 2 * GIB
    assert "kv 2.00" in PLAN.said()


def test_all_that_is_measured_is_kept_free(pair):
    card = Card(total=1000 << 20, held=100 << 20, each=50 << 20)
    plan = profile(pair, card, gpu_memory_share=0.8).plan(sampler_bytes=7 << 20)
    assert card.measured == 2
    assert card.graph_costs().graphs == 1, "the largest alone"
    assert (plan.limit, plan.taken, plan.features) == (800 << 20, 100 << 20, 1 << 20)
    assert plan.graphs >= 50 << 20
    assert plan.kv == plan.limit - ((100 + 50 + 50 + 1 + 7) << 20) - plan.graphs


def test_steps_that_run_as_they_are_need_no_room_for_graphs(pair):
    card = Card(total=1 << 30, each=5)
    assert profile(pair, card, enforce_eager=True).plan(0).graphs == 0
    assert card.graph_costs().graphs == 0


def test_the_largest_picture_is_a_batch_or_one_item_that_the_pool_can_hold(pair):
    seen = []
    forward = pair.model.encoder.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair.model.encoder, "forward", lambda p, g: seen.append(g) or forward(p, g))
        for tokens_, held in ((16, 8), (16, 100)):
            measured = profile(pair, Card(1 << 30), tokens_)
            patch.setattr(type(pair.model), "vision_token_bytes", property(lambda _, n=held: (1 << 20) // n))
            with suppress(RuntimeError):  # features are of another width now
                measured._largest_picture()
    assert seen == [[(8, 8)], [(20, 20)]]


def test_the_pool_is_as_large_as_what_is_left_and_the_engine_runs_in_it(pair, monkeypatch):
    card = Card(total=400 << 20, held=60 << 20, each=1 << 20)
    monkeypatch.setattr(engines, "device_for", lambda device, eager=False: card)
    config = Config.of(step_tokens=64, max_running=4, encoder_cache_mib=1, threads=2)
    engine = Engine(pair.model, config, eos_ids=())
    nbytes = engine.kv.data.nbytes
    assert 20 << 20 < nbytes < 40 << 20, "what others, the sampler and the graphs leave"
    reference = Engine(pair.model, Config.of(kv_cache_mib=4, threads=2), eos_ids=())
    answers = []
    for each in (engine, reference):
        each.submit(prepared(pair, pair.prompt(5, ("image", 4, 6), 7)))
        answers.append(tokens(drain(each)["r"]))
    assert answers[0] == answers[1]
    assert engine.stats()["graphs"] == card.graph_costs().graphs > 1, "all sizes, before the first step"


def test_a_size_that_is_asked_for_is_not_measured(pair):
    card = Card(total=100 << 20)
    pool = kv_pool(pair.model, Config.of(kv_cache_mib=3), card)
    assert pool.data.nbytes <= 3 << 20
    assert card.measured == 0


def test_a_cpu_has_its_own_default(pair):
    from mmserve.engine.runner.devices import CPUDevice

    assert kv_pool(pair.model, Config(), CPUDevice()).data.nbytes == pytest.approx(1 << 30, rel=0.01)


def test_no_room_is_told_with_what_takes_it(pair):
    plan = MemoryPlan(GIB, GIB // 2, GIB, 0, 0, 0, 0, 0)
    with pytest.raises(ConfigError, match="no memory left") as refused:
        pages_left(plan, shape_of(pair.model), 16)
    assert refused.value.param == "gpu_memory_share"
    assert "taken 1.00" in refused.value.message


def test_slots_stay_within_what_kernels_can_tell(pair):
    endless = MemoryPlan(1 << 60, 1 << 60, 0, 0, 0, 0, 0, 0)
    assert pages_left(endless, shape_of(pair.model), 16) * 16 <= MOST_SLOTS


def test_what_is_measured_runs_without_a_gpu_as_on_one(pair):
    """On a CPU nothing is counted, but all of it is computed."""
    plan = profile(pair, Card(total=1 << 30), encoder_tokens=64, page_size=1).plan(0)
    assert plan.kv > 0
    assert torch.is_inference_mode_enabled() is False
