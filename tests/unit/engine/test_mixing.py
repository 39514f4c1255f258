"""Pictures and prompts beside answers that are being written: bounded, in turns, and nobody starves.

Time is what the fakes say: a part of a picture takes PART_S, a step DECODE_S and TOKEN_S for a prompt token.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.engine_requests import drain, prepared
from msgspec.structs import replace

from mmserve.core.config import NO_BOUND, Config
from mmserve.core.messages import PixelsWanted
from mmserve.engine.engine import Engine
from mmserve.engine.mixing import IDLE_SLICE_S, REFRESH, Mixing
from mmserve.engine.runner.inputs import PROMPT_ROWS, padded

DECODE_S, TOKEN_S, PART_S = 0.05, 0.002, 0.01
PART_WORK = 1e9
PARTS = 40  # of a picture
FACTOR = 2.5


def seen(factor=FACTOR):
    """A policy that knows the machine."""
    mixing = Mixing(factor)
    for _ in range(30):
        mixing.computed(0, 1, DECODE_S)
        mixing.encoded(PART_WORK, 0, PART_S)
        mixing.encoded(PART_WORK, 1, PART_S)
        for rows in range(8, 48, 8):
            mixing.computed(rows - 1, 1, DECODE_S + (rows - 1) * TOKEN_S)
    mixing.computed(0, 1, DECODE_S)
    return mixing


# ---------------------------------------------------------------- the policy alone


def test_what_stands_beside_decodes_follows_from_what_steps_took():
    mixing = seen()
    spare = (FACTOR - 1) * DECODE_S
    assert mixing.slice_work(1) == pytest.approx(spare / PART_S * PART_WORK, rel=0.01)
    assert mixing.prompt_tokens(1, encoded=False) == 31  # 1 + 37 in whole PROMPT_ROWS
    assert mixing.prompt_tokens(7, encoded=False) == 25
    assert mixing.prompt_tokens(1, encoded=True) == 0, "one or the other"


def test_a_slower_machine_gets_smaller_slices():
    mixing = seen()
    before = mixing.slice_work(1)
    for _ in range(40):
        mixing.encoded(PART_WORK, 1, 4 * PART_S)
    assert mixing.slice_work(1) == pytest.approx(before / 4, rel=0.01)


def test_slices_beside_a_device_that_goes_on_are_measured_and_nobody_waits():
    mixing = seen()
    before, waits = mixing.slice_work(1), mixing.waits
    for _ in range(40):
        mixing.encoded_apart(PART_WORK, 1, 2 * PART_S)
    assert mixing.slice_work(1) == pytest.approx(before / 2, rel=0.01)
    assert mixing.waits == waits


def test_one_hiccup_changes_little():
    mixing = seen()
    before = mixing.slice_work(1)
    mixing.computed(0, 1, 100 * DECODE_S)
    assert before < mixing.slice_work(1) < 1.5 * before


def test_the_first_decode_of_all_may_take_its_time():
    mixing = Mixing(FACTOR)
    mixing.computed(0, 1, 30 * DECODE_S)
    for _ in range(8):
        mixing.computed(0, 1, DECODE_S)
    assert mixing.decode.seconds == pytest.approx(DECODE_S, rel=0.15)


def test_decodes_behind_a_slice_of_the_encoder_are_no_yardstick():
    mixing = seen()
    mixing.encoded(PART_WORK, 1, PART_S)
    mixing.computed(0, 1, 2 * DECODE_S)
    assert mixing.decode.seconds == pytest.approx(DECODE_S)
    mixing.computed(0, 1, 2 * DECODE_S)
    assert mixing.decode.seconds > 1.1 * DECODE_S


def test_steps_that_are_not_typical_take_their_turn_and_are_no_measure():
    mixing = seen()
    before = mixing.decode.seconds, dict(mixing.costs.of)
    mixing.encoded(PART_WORK, 1, PART_S)
    assert not mixing.encoders_turn
    mixing.computed(15, 1, 10 * DECODE_S, typical=False)
    assert mixing.encoders_turn
    mixing.computed(0, 1, 10 * DECODE_S, typical=False)
    assert (mixing.decode.seconds, mixing.costs.of) == before


def test_slices_beside_decodes_go_by_what_such_slices_take():
    mixing = seen()
    before = mixing.slice_work(1)
    for _ in range(40):
        mixing.encoded(PART_WORK, 0, 10 * PART_S)
    assert mixing.slice_work(1) == pytest.approx(before)
    assert mixing.slice_work(0) == pytest.approx(IDLE_SLICE_S / (10 * PART_S) * PART_WORK, rel=0.01)


class Bends:
    """A machine on which ``free`` rows cost nothing beside a decode, and each more TOKEN_S."""

    def __init__(self, free, factor=FACTOR):
        self.free = free
        self.mixing = Mixing(factor)
        self.rows = []
        for _ in range(3):
            self.mixing.computed(0, 1, DECODE_S)

    def seconds(self, rows, slowness=1.0):
        return slowness * (DECODE_S + max(rows - self.free, 0) * TOKEN_S)

    def run(self, steps, slowness=1.0):
        for _ in range(steps):
            tokens = self.mixing.prompt_tokens(1, encoded=False)
            self.mixing.computed(tokens, 1, self.seconds(tokens + 1, slowness))
            self.rows.append(tokens + 1)
            self.mixing.computed(0, 1, slowness * DECODE_S)
        return self.rows[-steps:]


@pytest.mark.parametrize("free", [0, 8, 30])
def test_more_rows_are_tried_one_size_after_the_other_until_the_next_costs_too_much(free):
    world = Bends(free)
    most = max(rows for rows in range(8, 200, 8) if world.seconds(rows) <= FACTOR * DECODE_S)
    rows = world.run(300)
    assert rows[0] == 8
    assert all(after <= before + 16 for before, after in pairwise(rows))
    assert set(rows[100:]) <= {most - most % 16 if most > 64 else most, padded(most + 1)}
    assert sum(r > most for r in rows[100:]) <= 5, "what costs too much is tried seldom"


def test_rows_that_cost_nothing_by_mistake_do_not_make_the_next_ones_free():
    """Steps of 8 rows that seem to take no longer than decodes: 16 are tried, not 500."""
    mixing = Bends(0).mixing
    for _ in range(REFRESH - 1):
        mixing.computed(7, 1, DECODE_S)
    assert mixing.prompt_tokens(1, encoded=False) == 15


def test_where_nobody_waits_prompts_have_all_they_want_from_the_first_step_on():
    mixing = Bends(0, factor=NO_BOUND).mixing
    assert mixing.prompt_tokens(1, encoded=False) is None
    assert mixing.prompt_tokens(1, encoded=True) == 0, "in turns all the same"


def test_costs_stay_true_when_the_whole_machine_becomes_slower():
    world = Bends(8)
    before = world.run(100)[-1]
    assert set(world.run(400, slowness=3.0)[-20:]) == {before}


def test_rows_that_became_cheaper_are_found_again():
    world = Bends(0)
    before = world.run(100)[-1]
    world.free = 16
    assert max(world.run(400)) >= before + 16


def test_the_least_is_one_part_and_a_few_rows():
    mixing = seen(factor=1.0)
    assert mixing.slice_work(1) == 1.0
    for decodes in range(1, 40):
        tokens = mixing.prompt_tokens(decodes, encoded=False)
        assert PROMPT_ROWS // 2 <= tokens < 3 * PROMPT_ROWS // 2
        assert (decodes + tokens) % PROMPT_ROWS == 0


def test_when_nobody_decodes_prompts_are_unbounded_and_slices_are_long():
    mixing = seen()
    assert mixing.prompt_tokens(0, encoded=True) is None
    assert mixing.slice_work(0) == pytest.approx(IDLE_SLICE_S / PART_S * PART_WORK, rel=0.01)


def test_without_a_factor_nothing_is_bounded():
    mixing = seen(factor=None)
    mixing.encoded(PART_WORK, 1, PART_S)
    assert mixing.encoders_turn
    assert mixing.slice_work(5) == float("inf")
    assert mixing.prompt_tokens(5, encoded=True) is None


def test_turns_go_round():
    mixing = seen()
    mixing.computed(10, 1, DECODE_S)
    assert mixing.encoders_turn
    mixing.encoded(PART_WORK, 1, PART_S)
    mixing.computed(0, 1, DECODE_S)
    assert not mixing.encoders_turn
    mixing.computed(10, 1, DECODE_S)
    assert mixing.encoders_turn


def test_a_step_of_decodes_alone_is_seen_first_and_again_now_and_then():
    mixing = Mixing(FACTOR)
    assert (mixing.slice_work(1), mixing.prompt_tokens(1, encoded=False)) == (0.0, 0)
    mixing.computed(0, 1, DECODE_S)
    for _ in range(REFRESH):
        assert mixing.prompt_tokens(1, encoded=False) > 0
        mixing.computed(10, 1, DECODE_S)
    assert mixing.prompt_tokens(1, encoded=False) == 0
    mixing.computed(0, 1, DECODE_S)
    assert mixing.prompt_tokens(1, encoded=False) > 0


def test_what_decodes_waited_for_is_counted():
    mixing = seen()
    waits, seconds = mixing.waits, mixing.wait_seconds
    mixing.encoded(PART_WORK, 1, 0.5)
    mixing.encoded(PART_WORK, 0, 9.0)  # nobody waited
    mixing.computed(10, 1, DECODE_S + 0.1)
    assert mixing.waits == waits + 2
    assert mixing.wait_seconds == pytest.approx(seconds + 0.6, rel=0.01)
    assert mixing.longest_wait_seconds == 0.5


# ---------------------------------------------------------------- the engine


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowEncoder:
    def __init__(self, pair, clock):
        self.pair, self.clock = pair, clock
        self.begun = []  # the sizes of its batches
        self.fails_at = None

    def parts(self, pixels, grids):
        self.begun.append(len(grids))
        for n in range(PARTS * len(grids)):
            if n == self.fails_at:
                raise RuntimeError("out of luck")
            self.clock.now += PART_S
            yield PART_WORK
        size = self.pair.model.vision_token_bytes
        return [torch.zeros(h * w // 4 * size, dtype=torch.uint8) for h, w in grids]


class SlowSteps:
    """Stands where runner and sampler were."""

    def __init__(self, clock):
        self.clock = clock
        self.chunks = []  # (request, prompt tokens) of each step

    def run(self, batch):
        self.clock.now += DECODE_S + TOKEN_S * sum(map(len, batch.prompts))
        self.chunks.append([(chunk.request.request_id, len(chunk)) for chunk in batch.prompts])
        return torch.zeros(len(batch.sampling), 1)

    def sample(self, logits, requests):
        return [(1, None) for _ in requests]

    def forget(self, request):
        pass

    def check_integrity(self, requests):
        pass


class World:
    """An engine on a fake machine, and one answer that is being written for ever."""

    def __init__(self, pair, stream=True, **options):
        self.pair, self.clock = pair, Clock()
        fixed = {"kv_cache_mib": 8, "max_model_len": 3000, "encoder_tokens": 8, "stall_factor": FACTOR}
        config = Config.of(**{**fixed, **options})
        self.engine = Engine(pair.model, config, eos_ids=(), clock=self.clock)
        self.encoder = self.engine.stage.encoder = SlowEncoder(pair, self.clock)
        self.steps = self.engine.runner = self.engine.sampler = SlowSteps(self.clock)
        self.outputs = {}
        self.waits = []  # seconds from token to token of the stream
        if stream:
            self.submit("stream", 5, max_tokens=2500)
            while "stream" not in self.outputs:
                self.step()
            self.step()

    def submit(self, name, *parts, seed=None, **sampling):
        seed = len(self.outputs) + len(self.engine._requests) if seed is None else seed
        request = prepared(self.pair, self.pair.prompt(*parts, seed=seed), name, **sampling)
        self.engine.submit(request)
        return request

    def step(self):
        start = self.clock.now
        found = self.engine.step()
        for output in found:
            self.outputs.setdefault(output.request_id, []).append(output)
        if "stream" in self.engine._requests:
            assert [o.request_id for o in found].count("stream") == 1, "a token in every step"
            self.waits.append(self.clock.now - start)
        self.engine.check_integrity()
        return found

    def until(self, *names, most=3000):
        """Step until each of ``names`` has said something."""
        for _ in range(most):
            if all(name in self.outputs for name in names):
                return
            self.step()
        raise AssertionError(f"nothing of {set(names) - self.outputs.keys()}")


PICTURE = (20, ("image", 4, 8), 40)


def test_an_answer_goes_on_between_slices_while_pictures_arrive(pair):
    world = World(pair)
    world.waits.clear()
    names = [f"picture {i}" for i in range(8)]
    for name in names:
        world.submit(name, *PICTURE, max_tokens=3)
    world.until(*names)
    assert world.encoder.begun == [1] * 8
    assert max(world.waits) <= FACTOR * DECODE_S + PART_S + PROMPT_ROWS * TOKEN_S
    slices = 8 * PARTS * PART_S / ((FACTOR - 1) * DECODE_S)
    assert len(world.waits) < 2.2 * slices, "the time beside decodes is used"


def test_a_step_in_which_a_forward_is_captured_is_no_measure_of_such_steps(pair):
    world = World(pair)
    run, costs = world.steps.run, world.engine.device.graph_costs()

    def capturing(batch):
        costs.graphs += bool(batch.prompts)
        world.clock.now += DECODE_S * 10 * bool(batch.prompts)
        return run(batch)

    world.steps.run = capturing
    world.submit("captured", 20)
    world.until("captured")
    assert world.engine.mixing.costs.of == {}
    world.steps.run = run
    world.submit("replayed", 20)
    world.until("replayed")
    assert 0 < max(world.engine.mixing.costs.of.values()) < 3


def test_both_pictures_and_prompts_go_on_beside_an_endless_answer(pair):
    world = World(pair)
    world.submit("picture", *PICTURE)
    world.submit("text", 600)
    kinds = []
    while not ("picture" in world.outputs and "text" in world.outputs):
        slices = world.engine.stage.slices
        world.step()
        computed = dict(world.steps.chunks[-1])
        assert not (world.engine.stage.slices > slices and computed), "one or the other"
        kinds.append("slice" if world.engine.stage.slices > slices else "prompt" if computed else "none")
    both = "".join(k[0] for k in kinds[: kinds.count("slice")])
    assert "ss" not in both[2:], "while the picture is encoded the text has every other step"
    assert "ppp" not in both
    assert kinds.count("none") < 3


def test_a_picture_gets_through_while_texts_keep_coming(pair):
    world = World(pair)
    world.submit("picture", *PICTURE)
    for i in range(400):
        if "picture" in world.outputs:
            break
        world.submit(f"text {i}", 60, max_tokens=2)
        world.step()
    assert "picture" in world.outputs


def test_the_first_picture_is_answered_before_the_second_is_encoded(pair):
    world = World(pair, stream=False)
    for name in ("first", "second"):
        world.submit(name, *PICTURE, max_tokens=4)
    world.until("first")
    assert world.engine.stage.encoded_items == 1
    world.until("second")


def test_a_new_text_is_answered_before_a_huge_picture_is_encoded(pair):
    world = World(pair, stream=False)
    world.submit("picture", *PICTURE)
    world.step()
    world.submit("text", 9, max_tokens=1)
    for _ in range(2):
        world.step()
    assert "text" in world.outputs
    assert world.engine.stage.encoded_items == 0
    world.until("picture")


def test_without_a_bound_a_step_encodes_a_whole_batch(pair):
    world = World(pair, stall_factor=1e9)
    world.submit("picture", *PICTURE)
    while not world.engine.stage.slices:
        world.step()
    assert world.engine.stage.encoded_items == 1


def test_an_abort_in_the_middle_of_encoding_drops_the_work(pair):
    world = World(pair)
    world.submit("picture", *PICTURE)
    while not world.engine.stage.items:
        world.step()
    world.engine.abort("picture")
    assert not world.engine.stage.items
    assert world.engine.stats()["encoder_batches_dropped"] == 1
    world.engine.check_integrity()
    world.submit("next", *PICTURE, seed=77)
    world.until("next")
    assert world.engine.stats()["encoded_items"] == 1


def test_work_that_another_waits_for_is_not_dropped(pair):
    world = World(pair)
    for name in ("one", "other"):
        world.submit(name, *PICTURE, seed=5)
    while not world.engine.stage.items:
        world.step()
    world.engine.abort("one")
    assert world.engine.stage.items
    world.until("other")
    assert world.encoder.begun == [1]


def test_who_lacks_pixels_awaits_a_picture_that_is_being_encoded(pair):
    world = World(pair)
    whole = world.submit("whole", *PICTURE, seed=5)
    while not world.engine.stage.items:
        world.step()
    bare = tuple(replace(item, pixels=None) for item in whole.items)
    world.engine.submit(replace(whole, request_id="bare", items=bare))
    world.until("whole", "bare")
    assert not any(isinstance(o, PixelsWanted) for o in world.outputs["bare"])
    assert world.encoder.begun == [1]


def test_a_slice_that_fails_ends_those_who_wait_for_it(pair):
    world = World(pair)
    world.encoder.fails_at = PARTS // 2
    for name in ("one", "other"):
        world.submit(name, *PICTURE, seed=5)
    world.submit("text", 30, max_tokens=1)
    world.until("one", "other", "text")
    assert [world.outputs[n][0].finish_reason for n in ("one", "other", "text")] == [
        "error",
        "error",
        "length",
    ]
    assert world.outputs["one"][0].error == "RuntimeError: out of luck"
    assert not world.engine.stage.items


def test_pixels_may_go_in_the_middle_of_encoding(pair):
    """The batch in work holds them itself: whoever aborts gives back the request's own."""
    world = World(pair)
    first = world.submit("first", *PICTURE, seed=5)
    while not world.engine.stage.items:
        world.step()
    assert np.shares_memory(world.engine.stage.items[0].pixels, first.items[0].pixels)
    world.submit("second", *PICTURE, seed=5)
    world.engine.abort("first")
    world.until("second")


def test_real_pictures_in_slices_answer_as_whole(pair):
    prompts = [pair.prompt(4, ("image", 16, 34), 5, ("image", 4, 4), 3, seed=i) for i in range(3)]

    def answers(**options):
        engine = Engine(pair.model, Config.of(kv_cache_mib=4, **options), eos_ids=())
        engine.submit(prepared(pair, pair.prompt(5, seed=9), "stream", max_tokens=200))
        for _ in range(3):
            engine.step()
        for i, prompt in enumerate(prompts):
            engine.submit(prepared(pair, prompt, str(i)))
        outputs = drain(engine)
        return [[t for o in outputs[str(i)] for t in o.token_ids] for i in range(3)], engine.stage.slices

    (sliced, many), (whole, few) = answers(stall_factor=1.0), answers(stall_factor=1e9)
    assert sliced == whole
    assert many > 3 * few
