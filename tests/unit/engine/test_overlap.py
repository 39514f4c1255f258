"""Steps in flight: the same answers in another order of events, and nobody reads what is not there yet."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from helpers.engine_requests import drain, make_engine, prepared, tokens
from helpers.equal_models import assert_at_rest, with_pages
from helpers.late_device import LateDevice
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mmserve.backends import expected
from mmserve.core.config import Config
from mmserve.engine import engine as engines
from mmserve.engine.sampling import batch as sampling_batch
from mmserve.engine.sampling.drawn import on_device
from mmserve.engine.scheduler.request import Status

TEXT, PICTURE, TWO, CLIP = (
    (9,),
    (5, ("image", 4, 6), 7),
    (3, ("image", 4, 4), 2, ("image", 4, 4), 3),
    (4, ("video", 2, 4, 4), 6),
)
ANSWER = 12


class Chain:
    """A form in which each token decides what may come next: who draws must know what was said last."""

    complete = free = False

    def __init__(self, last=0):
        self.last = last

    def fill(self, row):
        row[:] = 0
        for token in ((5 * self.last + 3) % 80, (5 * self.last + 4) % 80):
            row.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token):
        assert token in ((5 * self.last + 3) % 80, (5 * self.last + 4) % 80)
        self.last = token

    def copy(self):
        return Chain(self.last)


DRAWN = {"temperature": 1.0, "seed": 7}
KINDS = {
    "greedy": {},
    "drawn": DRAWN,
    "cut": {**DRAWN, "top_k": 20, "top_p": 0.9},
    "penalised": {**DRAWN, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "stopped": {**DRAWN, "stop_token_ids": tuple(range(0, 60, 3))},
    "held": {**DRAWN, "stop_token_ids": tuple(range(60)), "min_tokens": 4},
    "told": {"logprobs": 2},
    "scored": {"prompt_logprobs": 1},
    "barred": DRAWN,
    "chained": DRAWN,
    "short": {"max_tokens": 1},
    "warm": {},
}


@dataclass(frozen=True)
class Ask:
    """A request to be made: of which prompt and kind, and when it comes and is aborted, in steps."""

    case: tuple
    kind: str
    seed: int = 0
    comes: int = 0
    aborted: int | None = None

    def send(self, pair, engine, name):
        prompt = pair.prompt(*self.case, seed=self.seed)
        request = prepared(pair, prompt, name, **{"max_tokens": ANSWER, **KINDS[self.kind]})
        if self.kind == "barred":
            request = replace(request, bad_words=((1, 2, 3), *((n, n) for n in range(0, 80, 2))))
        if self.kind == "warm":
            request = replace(request, warm=True)
        engine.submit(request, Chain() if self.kind == "chained" else None)

    @property
    def key(self):
        return (self.case, self.kind, self.seed)


def summary(outputs):
    """All that was said of one request."""
    told = [o.logprobs for o in outputs if o.logprobs]
    scores = [o.prompt_logprobs.token_ids.tolist() for o in outputs if o.prompt_logprobs]
    return tokens(outputs), outputs[-1].finish_reason, len(told), scores


class Alone:
    """Answers of an engine that waits for each step, one request at a time."""

    def __init__(self, pair):
        self.pair = pair
        self._known = {}

    def __call__(self, ask):
        if ask.key not in self._known:
            options = {"prefix_caching": ask.kind == "warm", "enforce_eager": True}
            engine = make_engine(self.pair, overlap="off", **options)
            ask.send(self.pair, engine, "r")
            self._known[ask.key] = summary(drain(engine)["r"])
        return self._known[ask.key]


@pytest.fixture(scope="module")
def alone(pair):
    return Alone(pair)


@pytest.fixture(scope="module", autouse=True)
def no_headroom():
    """Requests are admitted without room to grow, so that they have to give way to each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmserve.engine.scheduler.scheduler.HEADROOM_TOKENS", 0)
        yield


def in_flight(pair, **options):
    engine = make_engine(pair, overlap="on", **options)
    assert engine.overlap is not None
    return engine


# ---------------------------------------------------------------- equal answers


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_steps_that_wait(pair, alone, kind):
    engine = in_flight(pair, page_size=4)
    asks = [Ask(case, kind, seed) for seed, case in enumerate((TEXT, PICTURE, TWO, CLIP))]
    for number, ask in enumerate(asks):
        ask.send(pair, engine, str(number))
    outputs = drain(engine)
    assert [summary(outputs[str(n)]) for n in range(len(asks))] == [alone(ask) for ask in asks]
    assert_at_rest(engine)


CASES = st.sampled_from([TEXT, PICTURE, TWO, CLIP])
ASKS = st.builds(
    Ask,
    case=CASES,
    kind=st.sampled_from(list(KINDS)),
    seed=st.integers(0, 2),
    comes=st.integers(0, 14),
    aborted=st.one_of(st.none(), st.none(), st.integers(1, 25)),
)


@settings(max_examples=30, deadline=None)
@given(
    asks=st.lists(ASKS, min_size=1, max_size=9),
    pages=st.sampled_from([10, 12, 40]),
    running=st.sampled_from([2, 8]),
    budget=st.sampled_from([5, 16, 512]),
    caching=st.booleans(),
)
def test_random_traffic_with_aborts_is_answered_as_each_alone(
    pair, alone, asks, pages, running, budget, caching
):
    """Pages for one request and a little, or for all; what is aborted has said a part of its answer."""
    if not caching:
        asks = [ask for ask in asks if ask.kind != "warm"]
    options = {"max_running": running, "step_tokens": budget, "prefix_caching": caching}
    engine = in_flight(pair, max_model_len=40, page_size=4, enforce_eager=True, **options)
    with_pages(engine, pages)
    outputs, gone, step = {}, set(), 0
    while step < 30 or engine.has_work:
        for number, ask in enumerate(asks):
            if ask.comes == step:
                ask.send(pair, engine, str(number))
            if ask.aborted is not None and ask.comes + ask.aborted == step:
                last = engine.abort(str(number))
                if last is not None:
                    outputs.setdefault(str(number), []).append(last)
                    gone.add(number)
        engine.check_integrity()
        for output in engine.step():
            assert int(output.request_id) not in gone, "nothing comes after an abort"
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        step += 1
        assert step < 2000, "something never finished"
    event(f"preemptions: {min(engine.stats()['preemptions'], 2)}")
    for number, ask in enumerate(asks):
        said, whole = summary(outputs[str(number)]), alone(ask)
        if number in gone:
            assert said[0] == whole[0][: len(said[0])]
        else:
            assert said == whole
    assert_at_rest(engine)


def test_who_gives_way_with_a_token_in_flight_goes_on_with_it(pair, alone):
    """Also where it was the last one, or one that ends the answer."""
    for kind in ("drawn", "stopped", "short", "chained"):
        ask = Ask(TEXT, kind)
        for steps in range(1, ANSWER, 2):
            engine = in_flight(pair, page_size=4, enforce_eager=True)
            ask.send(pair, engine, "r")
            outputs = [o for _ in range(steps) for o in engine.step()]
            if not engine.has_work:
                break
            request = engine._requests["r"]
            if request.status is Status.RUNNING:
                engine.scheduler._preempt(request)
            engine.check_integrity()
            outputs += drain(engine).get("r", [])
            assert summary(outputs) == alone(ask), (kind, steps)


def test_what_is_cached_afterwards_is_the_same(pair):
    """A row that was computed for a request that had ended leaves nothing behind."""
    kept = []
    for overlap in ("off", "on"):
        engine = make_engine(pair, overlap=overlap, page_size=1)
        for seed in range(3):
            Ask(PICTURE, "stopped", seed).send(pair, engine, str(seed))
        drain(engine)
        stats = engine.stats()
        kept.append((stats["kv_pages_cached"], stats["kv_pages_free"], stats["prefix_nodes"]))
    assert kept[0] == kept[1]


# ---------------------------------------------------------------- who waits for whom


@dataclass
class Events:
    """What an engine does, in its order: forwards, draws, results."""

    engine: object
    seen: list = field(default_factory=list)

    def __post_init__(self):
        self._watch(self.engine.runner, "run", "forward")
        self._watch(self.engine.sampler, "draw", "draw")
        land = self.engine._land

        def landing(overlap):
            if overlap.flight is not None:
                self.seen.append("results")
            return land(overlap)

        self.engine._land = landing

    def _watch(self, part, method, name):
        call = getattr(part, method)

        def watched(*args):
            self.seen.append(name)
            return call(*args)

        setattr(part, method, watched)

    def take(self):
        seen, self.seen[:] = list(self.seen), []
        return seen

    def step(self):
        self.engine.step()
        return self.take()


def test_a_step_is_launched_before_the_results_of_the_one_before_are_read(pair):
    engine = in_flight(pair)
    Ask(TEXT, "greedy").send(pair, engine, "r")
    events = Events(engine)
    assert events.step() == ["forward", "draw"]
    assert [events.step() for _ in range(3)] == [["forward", "draw", "results"]] * 3


def test_an_end_by_length_is_foreseen_and_one_by_a_stop_token_is_seen_a_step_late(pair, alone):
    for kind, late in (("greedy", 0), ("stopped", 1)):
        ask = Ask(TEXT, kind, 1)
        engine = in_flight(pair)
        ask.send(pair, engine, "r")
        events = Events(engine)
        seen = [each for _ in range(40) if engine.has_work for each in events.step()]
        said = len(alone(ask)[0])
        assert said > 1
        assert (seen.count("forward"), seen.count("draw")) == (said + late, said + late)


@pytest.mark.parametrize("kind", ["chained", "barred"])
def test_a_draw_that_needs_words_waits_and_its_forward_does_not(pair, kind):
    engine = in_flight(pair)
    Ask(TEXT, kind).send(pair, engine, "r")
    Ask(TEXT, "greedy", 1).send(pair, engine, "other")
    events = Events(engine)
    assert events.step() == ["forward", "draw"]
    assert [events.step() for _ in range(3)] == [["forward", "results", "draw"]] * 3


def test_a_step_that_may_have_to_preempt_waits_for_results(pair):
    engine = in_flight(pair, page_size=4, prefix_caching=False, max_model_len=40)
    with_pages(engine, 9)
    for number in range(2):
        Ask(TEXT, "greedy", number).send(pair, engine, str(number))
    events = Events(engine)
    seen = [events.step() for _ in range(60) if engine.has_work]
    assert engine.stats()["preemptions"] > 0
    assert ["results", "forward", "draw"] in seen
    assert ["forward", "draw", "results"] in seen


def test_a_warm_request_ends_with_the_results_of_its_step(pair):
    engine = in_flight(pair, page_size=4)
    Ask(PICTURE, "warm").send(pair, engine, "r")
    assert engine.step() == []
    assert engine.has_work
    (last,) = engine.step()
    assert last.finish_reason == "stop"
    assert not engine.has_work


def test_nothing_is_left_to_do_when_all_in_flight_are_aborted(pair):
    engine = in_flight(pair)
    for number in range(3):
        Ask(TEXT, "greedy", number).send(pair, engine, str(number))
    for _ in range(3):
        engine.step()
    for number in range(3):
        engine.abort(str(number))
    assert not engine.has_work
    engine.check_integrity()
    assert engine.step() == []
    Ask(PICTURE, "greedy").send(pair, engine, "next")
    assert len(tokens(drain(engine)["next"])) == ANSWER


def test_a_forward_that_fails_ends_its_own_after_what_was_in_flight(pair, alone, monkeypatch):
    ask = Ask(TEXT, "drawn")
    engine = in_flight(pair)
    ask.send(pair, engine, "r")
    outputs = engine.step() + engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", _broken)
        outputs += engine.step()
    assert tokens(outputs) == alone(ask)[0][:2]
    assert (outputs[-1].finish_reason, outputs[-1].error) == ("error", "RuntimeError: out of luck")
    assert_at_rest(engine)
    ask.send(pair, engine, "next")
    assert summary(drain(engine)["next"]) == alone(ask)


@pytest.mark.parametrize("kind", ["drawn", "chained"])
def test_a_draw_that_fails_does_the_same(pair, alone, monkeypatch, kind):
    ask = Ask(TEXT, kind)
    engine = in_flight(pair)
    ask.send(pair, engine, "r")
    outputs = engine.step() + engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.sampler, "draw", _broken)
        outputs += engine.step()
    assert tokens(outputs) == alone(ask)[0][:2]
    assert outputs[-1].finish_reason == "error"
    assert_at_rest(engine)


def test_an_error_that_shows_in_results_alone_is_raised(pair, monkeypatch):
    """What was launched since rests on a step that never was."""
    engine = in_flight(pair)
    Ask(TEXT, "greedy").send(pair, engine, "r")
    engine.step()
    monkeypatch.setattr(type(engine.overlap.flight), "results", _broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        engine.step()


def _broken(*args):
    raise RuntimeError("out of luck")


# ---------------------------------------------------------------- tokens that the host does not know


class LateResults(LateDevice):
    """Copies to the host alone are late: until they are waited for, the host finds POISON."""

    def __init__(self):
        super().__init__()
        self._pinned = []

    def pinned(self, shape, dtype):
        memory = super().pinned(shape, dtype)
        self._pinned.append(memory.untyped_storage().data_ptr())
        return memory

    def copy(self, target, source):
        if target.untyped_storage().data_ptr() in self._pinned:
            source = source.clone()  # as it is when the stream comes to it
            super().copy(target, source)
        else:
            target.copy_(source)


@pytest.fixture
def late(monkeypatch):
    """Engines on such a device, whose plain greedy draws stay there."""

    def draw(self, logits):
        if not self.plain:
            return made(self, logits)
        self.age += 1
        return on_device(logits.argmax(-1))

    made = sampling_batch.SamplingBatch.draw
    monkeypatch.setattr(engines, "device_for", lambda device, eager=False: LateResults())
    monkeypatch.setattr(sampling_batch.SamplingBatch, "draw", draw)


@pytest.mark.parametrize("budget", [6, 512])
def test_sampled_ids_feed_the_next_step_where_they_are(pair, alone, late, budget):
    """In the same rows and in others: requests come and end at different times."""
    engine = in_flight(pair, page_size=4, step_tokens=budget)
    assert engine.overlap.flight is None
    asks = [
        Ask(case, kind, seed)
        for seed, (case, kind) in enumerate(
            [(TEXT, "greedy"), (PICTURE, "greedy"), (TEXT, "short"), (TWO, "greedy"), (CLIP, "greedy")]
        )
    ]
    outputs = {}
    for number, ask in enumerate(asks):
        ask.send(pair, engine, str(number))
        for output in engine.step() + engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for name, more in drain(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert [summary(outputs[str(n)]) for n in range(len(asks))] == [alone(ask) for ask in asks]
    assert len(engine.overlap._fetches.free) <= 2, "as many buffers as steps that are in flight at once"


def test_the_host_waits_for_a_step_when_the_next_one_stands_behind_it(pair, late):
    engine = in_flight(pair)
    Ask(TEXT, "greedy").send(pair, engine, "r")
    Events(engine)
    for _ in range(3):
        engine.step()
    device = engine.device
    device.log.clear()
    events = Events(engine)
    land = engine._land
    engine._land = lambda overlap: (device.log.append(("land",)), land(overlap))[1]
    engine.step()
    fetches = [entry for entry in device.log if entry[0] in ("land", "synchronize")]
    place = fetches.index(("land",))
    assert fetches[place + 1][0] == "synchronize"
    assert events.take() == ["forward", "draw", "results"]


# ---------------------------------------------------------------- the option


def test_a_cpu_has_nothing_to_hide_and_a_gpu_has(pair):
    assert make_engine(pair).overlap is None
    assert expected(Config.of(overlap="on"))["overlap"]["runs"] == "on"
    assert expected(Config.of())["overlap"]["runs"] == "off"
    from mmserve.engine.runner.overlap import choose_overlap

    assert choose_overlap("auto", torch.device("cuda"))[0] == "on"
    assert choose_overlap("off", torch.device("cuda")) == ("off", "asked for")


def test_what_is_to_run_as_it_is_is_not_recorded(pair):
    engine = make_engine(pair, enforce_eager=True)
    Ask(TEXT, "greedy").send(pair, engine, "r")
    drain(engine)
    assert engine.device.graph_costs().graphs == 0
    assert expected(Config.of(enforce_eager=True))["graphs"] == {
        "runs": "none",
        "why": "enforce_eager is on",
    }
