"""An abort at every moment of a request's life, each by name: it frees everything at once, and whoever shares
its words and its picture goes on undisturbed."""

import pytest
from helpers.engine_requests import drain, make_engine, prepared
from helpers.equal_models import assert_at_rest, renamed, said
from msgspec.structs import replace

from mmserve.core.messages import PixelsWanted
from mmserve.engine.scheduler.request import Status

CASE = (5, ("image", 4, 6), 7, ("image", 8, 4), 9)
ANSWER = 9


class Scene:
    """An engine in which ``doomed`` is to be aborted. ``bystander`` has its prompt, or only its picture."""

    overlap = "off"

    def __init__(self, pair, **options):
        self.engine = make_engine(pair, page_size=4, **{"overlap": self.overlap, **options})
        self.request = prepared(pair, pair.prompt(*CASE, seed=1), max_tokens=ANSWER, logprobs=2)
        self.outputs = []

    def send(self, name, **changes):
        self.engine.submit(replace(renamed(self.request, name), **changes))
        return self.engine._requests[name]

    def step(self):
        self.outputs += self.engine.step()

    def until(self, condition, most=300):
        """Step until it is so."""
        for _ in range(most):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    def abort(self, name="doomed"):
        """It says so, once, and holds nothing when ``abort`` returns."""
        request = self.engine._requests[name]
        last = self.engine.abort(name)
        assert (last.request_id, last.finish_reason) == (name, "abort")
        assert request.status is Status.FINISHED
        assert not request.table.runs
        assert request.items_held == request.items_passed
        self.engine.check_integrity()

    def end(self):
        """The rest runs to its end; what was said to each, and nothing of ``doomed`` after its abort."""
        aborted = len([o for o in self.outputs if o.request_id == "doomed"])
        for outputs in drain(self.engine).values():
            self.outputs += outputs
        assert_at_rest(self.engine)
        assert len([o for o in self.outputs if o.request_id == "doomed"]) == aborted
        names = {o.request_id for o in self.outputs if o.finish_reason}
        return {name: said([o for o in self.outputs if o.request_id == name]) for name in names}


@pytest.fixture(autouse=True, params=["off", "on"])
def overlap(request, monkeypatch):
    """Every moment once more with a step in flight."""
    monkeypatch.setattr(Scene, "overlap", request.param)


@pytest.fixture(scope="module")
def cold(pair):
    scene = Scene(pair, prefix_caching=False, overlap="off")
    scene.send("alone")
    return scene.end()["alone"]


def test_while_it_waits_for_its_turn(pair, cold):
    scene = Scene(pair, max_running=1)
    scene.send("bystander")
    doomed = scene.send("doomed")
    scene.until(lambda: scene.engine.stats()["running"] == 1)
    assert doomed.status is Status.WAITING
    scene.abort()
    assert scene.engine.stats()["waiting"] == 0
    assert scene.end() == {"bystander": cold}


def test_while_it_waits_for_another_to_compute_its_prefix(pair, cold):
    scene = Scene(pair, step_tokens=6)
    first, doomed = scene.send("bystander"), scene.send("doomed")
    scene.until(lambda: doomed.awaited is first)
    assert doomed.status is Status.WAITING
    scene.abort()
    assert scene.end() == {"bystander": cold}


def test_while_another_waits_for_it_to_compute_a_prefix(pair, cold):
    scene = Scene(pair, step_tokens=6)
    doomed, follower = scene.send("doomed"), scene.send("bystander")
    scene.until(lambda: follower.awaited is doomed)
    scene.abort()
    assert scene.end() == {"bystander": cold}


def test_while_it_is_parked_for_want_of_pixels(pair, cold):
    scene = Scene(pair)
    bare = tuple(replace(item, pixels=None) for item in scene.request.items)
    doomed = scene.send("doomed", items=bare)
    scene.until(lambda: doomed.status is Status.PARKED)
    assert isinstance(scene.outputs.pop(), PixelsWanted)
    scene.abort()
    assert scene.engine.supply("doomed", {i.digest: i.pixels for i in scene.request.items}) is None
    scene.send("bystander")
    assert scene.end() == {"bystander": cold}


@pytest.mark.parametrize("shared", [True, False])
def test_while_its_picture_is_being_encoded(pair, cold, shared):
    """A part of the encoder's work in each step. Another may want the picture too, or nobody any more."""
    scene = Scene(pair)
    scene.engine.mixing.slice_work = lambda decodes: 1.0
    scene.send("doomed")
    if shared:
        scene.send("bystander")
    scene.until(lambda: scene.engine.stage.items)
    scene.step()
    scene.abort()
    if not shared:
        scene.step()
        assert not scene.engine.stage.items, "nobody wants it any more"
        scene.send("bystander")
    assert scene.end() == {"bystander": cold}


def test_while_it_holds_a_picture_that_it_has_not_come_to(pair, cold):
    scene = Scene(pair, step_tokens=3)
    doomed, _ = scene.send("doomed"), scene.send("bystander")
    scene.until(lambda: doomed.items_held == 2 and doomed.computed_len < doomed.items[1].span[0])
    scene.abort()
    assert scene.end() == {"bystander": cold}


@pytest.mark.parametrize("place", [3, 7, 19])
def test_in_the_middle_of_its_prompt(pair, cold, place):
    """Before a picture, inside one, and behind one."""
    scene = Scene(pair, step_tokens=place)
    doomed, _ = scene.send("doomed"), scene.send("bystander")
    scene.until(lambda: 0 < doomed.computed_len < doomed.num_tokens)
    scene.abort()
    assert scene.end() == {"bystander": cold}


def test_between_the_last_chunk_of_its_prompt_and_its_first_decode(pair, cold):
    scene = Scene(pair)
    doomed, _ = scene.send("doomed"), scene.send("bystander")
    scene.until(lambda: doomed.num_generated == 1)
    assert doomed.computed_len == doomed.prompt_len
    scene.abort()
    assert scene.end() == {"bystander": cold}


@pytest.mark.parametrize("generated", [2, ANSWER - 1])
def test_while_it_decodes(pair, cold, generated):
    scene = Scene(pair)
    doomed, _ = scene.send("doomed"), scene.send("bystander")
    scene.until(lambda: doomed.num_generated == generated)
    scene.abort()
    assert scene.end() == {"bystander": cold}


def test_when_it_has_been_preempted_and_waits_again(pair, cold):
    scene = Scene(pair)
    scene.send("bystander")
    doomed = scene.send("doomed")
    scene.until(lambda: doomed.num_generated == 3)
    scene.engine.scheduler._preempt(doomed)
    scene.abort()
    assert scene.end() == {"bystander": cold}


def test_in_the_step_that_finishes_it(pair, cold):
    """The step had ended it before the abort was heard: it is whole, and the abort finds nobody."""
    scene = Scene(pair)
    scene.send("doomed")
    scene.until(lambda: any(o.finish_reason for o in scene.outputs))
    assert scene.engine.abort("doomed") is None
    assert scene.end() == {"doomed": cold}


def test_in_the_step_that_failed(pair, monkeypatch):
    scene = Scene(pair)
    scene.send("doomed")
    with monkeypatch.context() as patch:
        patch.setattr(scene.engine.runner, "run", lambda *_, **__: 1 / 0)
        scene.until(lambda: any(o.finish_reason == "error" for o in scene.outputs))
    assert scene.engine.abort("doomed") is None
    assert scene.end().keys() == {"doomed"}


def test_twice_and_of_nobody(pair, cold):
    scene = Scene(pair)
    scene.send("doomed")
    scene.send("bystander")
    scene.step()
    scene.abort()
    assert scene.engine.abort("doomed") is None
    assert scene.engine.abort("who is that") is None
    assert scene.end() == {"bystander": cold}


def test_its_id_may_come_again_at_once(pair, cold):
    scene = Scene(pair)
    scene.send("doomed")
    scene.step()
    scene.abort()
    scene.outputs.clear()
    scene.send("bystander")
    assert scene.end() == {"bystander": cold}
