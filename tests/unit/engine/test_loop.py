"""The engine's thread: who hears what, and that nobody waits for an engine that is gone."""

import queue
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from mmserve.core.errors import EngineDead, InvalidRequest, MMServeError, Overloaded
from mmserve.core.messages import CarryOver, Grammar, PixelsWanted, SamplingParams, TokenOutput
from mmserve.engine.loop import EngineThread


class CountingEngine:
    """Requests are plain names; each gets three tokens unless it is aborted. "bare" wants pixels first."""

    def __init__(self):
        self.left = {}
        self.parked = {}
        self.gate = threading.Event()
        self.gate.set()
        self.fault = None
        self.asked = set()
        self.grammars = None
        self.matchers = []
        self.done = []

    @property
    def has_work(self):
        return bool(self.left)

    def submit(self, request, matcher=None):
        self.matchers.append(matcher)
        if request.request_id == "refused":
            raise Overloaded("full")
        if request.request_id == "absurd":
            raise TypeError("'<=' not supported between instances of 'int' and 'str'")
        self.left[request.request_id] = 3

    def supply(self, request_id, pixels):
        if request_id not in self.parked:
            return None
        if not pixels:
            del self.parked[request_id]
            return TokenOutput(request_id=request_id, token_ids=(), finish_reason="error")
        self.left[request_id] = self.parked.pop(request_id)
        return None

    def carry_over(self, order):
        if order.new_salt == "refused":
            raise InvalidRequest("no", param="kept")
        if order.new_salt == "absurd":
            raise ZeroDivisionError("by nought")
        for _ in order.keys:
            self.done.append("turn")
            yield
        return len(order.keys)

    def holds(self, digest):
        return digest == b"held"

    def abort(self, request_id):
        if self.left.pop(request_id, None) is None:
            return None
        return TokenOutput(request_id=request_id, token_ids=(), finish_reason="abort")

    def step(self):
        self.gate.wait(5)
        if self.fault:
            raise self.fault
        self.done.append("step")
        outputs = []
        if "bare" in self.left and self.left["bare"] == 3 and "bare" not in self.asked:
            self.parked["bare"] = self.left.pop("bare")
            self.asked.add("bare")
            outputs.append(PixelsWanted("bare", frozenset({b"d"})))
        for name in list(self.left):
            self.left[name] -= 1
            done = self.left[name] == 0
            outputs.append(
                TokenOutput(request_id=name, token_ids=(1,), finish_reason="length" if done else None)
            )
            if done:
                del self.left[name]
        return outputs

    def stats(self):
        return {"running": len(self.left)}

    def check_integrity(self):
        pass


class Named:
    def __init__(self, request_id, grammar=None):
        self.request_id = request_id
        self.sampling = SamplingParams(grammar=grammar)


class SlowDesk:
    """Grammars are compiled when the test says so."""

    def __init__(self):
        self.callbacks = []
        self.closed = False

    def close(self):
        self.closed = True

    def request(self, grammar, done):
        self.callbacks.append(done)

    def finish(self, result=None, error=None):
        future = Future()
        future.set_exception(error) if error else future.set_result(result)
        self.callbacks.pop(0)(future)


class FakeMatcher:
    def copy(self):
        return self


@pytest.fixture
def engine():
    return CountingEngine()


@pytest.fixture
def loop(engine):
    loop = EngineThread(engine)
    yield loop
    engine.gate.set()
    loop.stop()


def inbox():
    deliveries = queue.Queue()
    return deliveries, deliveries.put


def take(deliveries, count):
    return [deliveries.get(timeout=5) for _ in range(count)]


def test_outputs_go_to_their_own_waiters(loop):
    a, b = queue.Queue(), queue.Queue()
    loop.submit(Named("a"), a.put)
    loop.submit(Named("b"), b.put)
    for name, deliveries in (("a", a), ("b", b)):
        assert [o.finish_reason for o in take(deliveries, 3)] == [None, None, "length"]
        assert deliveries.empty(), name


def test_a_refusal_reaches_the_one_who_asked(loop):
    deliveries = queue.Queue()
    loop.submit(Named("refused"), deliveries.put)
    assert isinstance(take(deliveries, 1)[0], Overloaded)
    assert loop.alive


def test_a_request_that_cannot_be_taken_harms_nobody_else(loop):
    deliveries, good = queue.Queue(), queue.Queue()
    loop.submit(Named("absurd"), deliveries.put)
    loop.submit(Named("a"), good.put)
    [error] = take(deliveries, 1)
    assert isinstance(error, MMServeError)
    assert "TypeError" in error.message
    assert take(good, 3)[-1].finish_reason == "length"
    assert loop.alive


def test_an_abort_comes_before_the_next_step(loop, engine):
    deliveries, deliver = inbox()
    engine.gate.clear()
    loop.submit(Named("a"), deliver)
    loop.abort("a", deliver)
    engine.gate.set()
    other = queue.Queue()
    loop.submit(Named("b"), other.put)
    take(other, 3)
    assert deliveries.qsize() <= 1


def test_an_abort_leaves_another_request_of_the_same_id_alone(loop, engine):
    deliveries, deliver = inbox()
    engine.gate.clear()
    loop.submit(Named("a"), deliver)
    loop.abort("a", lambda delivery: None)
    engine.gate.set()
    assert take(deliveries, 3)[-1].finish_reason == "length"


def test_a_broken_engine_is_told_to_all_who_wait_and_to_all_who_come(loop, engine):
    deliveries = queue.Queue()
    engine.gate.clear()
    for name in "abc":
        loop.submit(Named(name), deliveries.put)
    engine.fault = RuntimeError("lost the pool")
    engine.gate.set()
    heard = take(deliveries, 3)
    assert all(isinstance(e, EngineDead) and "lost the pool" in e.message for e in heard)
    assert len({id(e) for e in heard}) == 3  # an error that is raised twice mixes two callers' frames
    assert not loop.alive
    with pytest.raises(EngineDead):
        loop.submit(Named("late"), deliveries.put)
    loop.abort("a", deliveries.put)
    assert loop.stats() == {"running": 3}


def test_pixels_that_are_wanted_are_asked_of_their_waiter_and_the_request_goes_on(loop):
    deliveries, deliver = inbox()
    loop.submit(Named("bare"), deliver)
    assert take(deliveries, 1) == [PixelsWanted("bare", frozenset({b"d"}))]
    loop.supply("bare", {b"d": None}, lambda delivery: None)  # a stranger's is no answer
    loop.supply("bare", {b"d": None}, deliver)
    assert [o.finish_reason for o in take(deliveries, 3)] == [None, None, "length"]


def test_a_supply_that_ends_its_request_is_told(loop):
    deliveries, deliver = inbox()
    loop.submit(Named("bare"), deliver)
    take(deliveries, 1)
    loop.supply("bare", {}, deliver)
    assert take(deliveries, 1)[0].finish_reason == "error"


def order(salt):
    return CarryOver(keys=np.arange(4), kept=((0, 4),), new_salt=salt)


def test_an_order_to_carry_over_is_answered_between_steps_also_when_nothing_runs(loop):
    deliveries, deliver = inbox()
    loop.carry_over(order("new"), deliver)
    assert take(deliveries, 1) == [4]


def test_steps_stand_between_the_turns_of_an_order(loop, engine):
    engine.gate.clear()
    (said, hear), (deliveries, deliver) = inbox(), inbox()
    loop.submit(Named("a"), hear)
    loop.carry_over(order("new"), deliver)
    engine.gate.set()
    assert take(deliveries, 1) == [4]
    take(said, 3)
    assert engine.done.count("turn") == 4
    first = engine.done.index("step")
    assert engine.done[first : first + 5] == ["step", "turn", "step", "turn", "step"]


def test_an_order_under_way_is_told_when_the_engine_ends(loop, engine):
    engine.gate.clear()
    deliveries, deliver = inbox()
    loop.submit(Named("a"), print)
    loop.carry_over(order("new"), deliver)
    engine.fault = RuntimeError("broken")
    engine.gate.set()
    [told] = take(deliveries, 1)
    assert isinstance(told, EngineDead)


def test_an_order_that_is_refused_or_fails_is_told_and_harms_nobody(loop):
    deliveries, deliver = inbox()
    good = queue.Queue()
    for salt in ("refused", "absurd"):
        loop.carry_over(order(salt), deliver)
    refusal, failure = take(deliveries, 2)
    assert (refusal.param, refusal.status) == ("kept", 400)
    assert "ZeroDivisionError" in failure.message
    loop.submit(Named("a"), good.put)
    assert take(good, 3)[-1].finish_reason == "length"


def test_an_order_that_comes_too_late_finds_the_engine_dead(loop):
    loop.stop()
    with pytest.raises(EngineDead):
        loop.carry_over(order("new"), print)


def test_what_is_held_may_be_asked_also_when_the_engine_is_gone(loop):
    assert loop.holds(b"held")
    assert not loop.holds(b"other")
    loop.stop()
    assert not loop.holds(b"held")


def test_stop_ends_what_runs(loop, engine):
    deliveries = queue.Queue()
    engine.gate.clear()
    loop.submit(Named("a"), deliveries.put)
    stopper = threading.Thread(target=loop.stop)
    stopper.start()
    engine.gate.set()
    stopper.join(5)
    assert not stopper.is_alive()
    reasons = []
    while not deliveries.empty():
        reasons.append(deliveries.get().finish_reason)
    assert reasons[-1] in ("abort", "length")
    with pytest.raises(EngineDead):
        loop.submit(Named("b"), deliveries.put)


# ---------------------------------------------------------------- requests with a grammar

FORM = Grammar("regex", "a", "response_format")


@pytest.fixture
def desk(engine):
    engine.grammars = SlowDesk()
    return engine.grammars


def until(condition):
    for _ in range(500):
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def test_a_request_waits_for_its_grammar_and_others_do_not(engine, loop, desk):
    formed, plain = queue.Queue(), queue.Queue()
    loop.submit(Named("formed", FORM), formed.put)
    loop.submit(Named("plain"), plain.put)
    assert [plain.get(timeout=5).request_id for _ in range(3)] == ["plain"] * 3
    assert formed.empty()
    matcher = FakeMatcher()
    desk.finish(matcher)
    assert formed.get(timeout=5).request_id == "formed"
    assert engine.matchers == [None, matcher]


def test_a_bad_grammar_refuses_its_own_request_and_names_its_field(loop, desk):
    answers = queue.Queue()
    loop.submit(Named("formed", FORM), answers.put)
    assert until(lambda: desk.callbacks)
    desk.finish(error=InvalidRequest("no", param="another's field", code="invalid_grammar"))
    refusal = answers.get(timeout=5)
    assert (refusal.param, refusal.code, refusal.status) == ("response_format", "invalid_grammar", 400)


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_begins(engine, loop, desk):
    answers, after = queue.Queue(), queue.Queue()
    deliver = answers.put
    loop.submit(Named("formed", FORM), deliver)
    assert until(lambda: desk.callbacks)
    loop.abort("formed", deliver)
    loop.submit(Named("after"), after.put)
    take(after, 3)
    desk.finish(FakeMatcher())
    loop.submit(Named("last"), after.put)
    assert until(lambda: len(engine.matchers) == 2)
    assert answers.empty()


def test_who_waits_for_a_grammar_hears_of_the_engines_end(engine, loop, desk):
    answers = queue.Queue()
    loop.submit(Named("formed", FORM), answers.put)
    assert until(lambda: desk.callbacks)
    loop.stop()
    assert isinstance(answers.get(timeout=5), EngineDead)
    assert desk.closed


def test_without_a_desk_a_grammar_is_refused(loop):
    answers = queue.Queue()
    loop.submit(Named("formed", FORM), answers.put)
    assert answers.get(timeout=5).param == "response_format"


# ---------------------------------------------------------------- after each step


def test_a_word_after_each_step_and_after_commands_without_one(engine):
    """What the callbacks of a step have gathered can be sent as one message."""
    heard, batches = [], queue.Queue()

    def after():
        batches.put(heard.copy())
        heard.clear()

    engine.gate.clear()
    loop = EngineThread(engine, after)
    for name in "ab":
        loop.submit(Named(name), heard.append)
    loop.submit(Named("refused"), heard.append)
    engine.gate.set()
    sizes = []
    while len(sizes) == 0 or sum(sizes) < 7:
        sizes.append(len(batches.get(timeout=5)))
    assert max(sizes) >= 2, "those of one step come together"
    loop.call(lambda: heard.append("called"))
    assert batches.get(timeout=5) == ["called"]
    loop.stop()
    assert batches.get(timeout=5) == []


def test_commands_run_on_the_engine_s_thread_and_not_when_it_has_ended(loop):
    there = queue.Queue()
    loop.call(lambda: there.put(loop.here))
    assert there.get(timeout=5)
    assert not loop.here
    loop.stop()
    loop.call(lambda: there.put("late"))
    assert there.empty()
