"""Which cells of a clip are said, and where those that are stand in the prompt."""

import numpy as np
import pytest
from helpers.preparing import chat_of, picture
from helpers.tiny_folder import write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmserve.core.config import Config, MediaOptions
from mmserve.core.errors import ConfigError, MediaError
from mmserve.core.messages import TextPart, VideoPart
from mmserve.preprocess.cache import EarlyAnswers
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.pruning import VISIBLE, prune
from mmserve.preprocess.spec import ProcessorSpec

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
GRID = (3, 4)  # cells of a frame


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("specs")
    return {name: ProcessorSpec.load(write_folder(folder / name, name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def spec(specs):
    return specs["qwen3_vl"]


def cell(spec):
    return spec.patch * spec.merge


def frame(spec, values):
    """A frame of flat cells of these luminances [rows, columns]."""
    side = cell(spec)
    grey = np.asarray(values, np.uint8).repeat(side, 0).repeat(side, 1)
    return np.repeat(grey[..., None], 3, 2)


def still(image):
    """An item that shows ``image`` twice."""
    return np.stack((image, image))


def flat(spec, value=100):
    return frame(spec, np.full(GRID, value))


def noise(seed, spec, deviation):
    size = (2, GRID[0] * cell(spec), GRID[1] * cell(spec), 3)
    return np.random.default_rng(seed).normal(0, deviation, size)


def kept_cells(pruned, cells=GRID[0] * GRID[1]):
    return [set(range(cells)) if own is None else set(own.tolist()) for own in pruned.kept]


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_clip_keeps_its_first_item_and_one_cell_of_each_other(specs, family):
    items = [still(flat(specs[family]))] * 6
    kept = prune(items, specs[family], 0.95).kept
    assert kept[0] is None
    assert [len(own) for own in kept[1:]] == [1] * 5


def test_the_noise_of_a_sensor_is_no_change(spec):
    base = still(flat(spec)).astype(float)
    items = [np.clip(base + noise(seed, spec, 8), 0, 255).astype(np.uint8) for seed in range(6)]
    assert [len(own) for own in prune(items, spec, 0.95).kept[1:]] == [1] * 5


def test_a_cut_loses_nothing(spec):
    items = [still(flat(spec, 40)), still(flat(spec, 40)), still(flat(spec, 200)), still(flat(spec, 200))]
    kept = prune(items, spec, 0.9).kept
    assert [own is None for own in kept] == [True, False, True, False]


def test_what_is_small_but_plain_is_seen(spec):
    other = flat(spec)
    at = cell(spec) + 5, 2 * cell(spec) + 3
    other[at[0] : at[0] + 5, at[1] : at[1] + 5] = 255
    kept = prune([still(flat(spec)), still(other)], spec, 0.9).kept
    assert kept[1].tolist() == [GRID[1] + 2]


def test_colours_of_one_brightness_are_told_apart(spec):
    red, green = flat(spec), flat(spec)
    red[:] = (200, 50, 50)
    grey = int(np.asarray(Image.fromarray(red).convert("L"))[0, 0])
    green[:] = (50, 117, 50)
    assert abs(int(np.asarray(Image.fromarray(green).convert("L"))[0, 0]) - grey) < 20
    assert prune([still(red), still(green)], spec, 0.9).kept[1] is None


def test_a_slow_drift_is_said_when_it_has_become_visible(spec):
    """Against the last kept, not the last: two levels an item would never be a change."""
    values = [100 + 2 * i for i in range(9)]
    items = [still(flat(spec, value)) for value in values]
    kept = kept_cells(prune(items, spec, 0.9))
    assert VISIBLE == 8
    assert [len(own) for own in kept[:5]] == [12, 1, 1, 1, 9]
    assert set().union(*kept[1:5]) == set(range(12)), "each has been said again"


def test_what_moved_through_a_cell_is_kept_once_more_at_rest(spec):
    """The pair in which it moves tells of both; the next one that it has gone."""
    there, gone = flat(spec), flat(spec)
    there[: cell(spec), : cell(spec)] = 255
    items = [still(gone), np.stack((there, gone)), still(gone), still(gone)]
    kept = prune(items, spec, 0.9).kept
    assert [own.tolist() for own in kept[1:3]] == [[0], [0]]
    assert kept[3].tolist() == [0], "the first of equal ones, since one must stay"
    busy = [np.stack((a, flat(spec, 30))) for a in (there, gone)]
    assert prune([*busy, still(flat(spec, 30))], spec, 0.9).kept[2] is None


def test_both_frames_of_an_item_count(spec):
    other = frame(spec, np.where(np.arange(12).reshape(GRID) == 7, 250, 100))
    for item in (np.stack((other, flat(spec))), np.stack((flat(spec), other))):
        assert prune([still(flat(spec)), item], spec, 0.9).kept[1].tolist() == [7]


def test_the_least_changed_go_first(spec):
    """Under a bound that has room for five of the eleven that could go."""
    changes = np.array([5, 1, 3, 2, 7, 6, 4, 0, 200, 7, 5, 6]).reshape(GRID)
    items = [still(flat(spec)), still(frame(spec, 100 + changes))]
    kept = prune(items, spec, 5.5 / 24).kept
    assert sorted(set(range(12)) - set(kept[1].tolist())) == [1, 2, 3, 6, 7]


def test_equal_ones_go_from_all_items_alike(spec):
    kept = prune([still(flat(spec))] * 5, spec, 0.4).kept
    assert [len(own) for own in kept[1:]] == [6] * 4


CLIPS = st.lists(
    st.lists(st.sampled_from([90, 94, 97, 104, 160]), min_size=12, max_size=12), min_size=1, max_size=7
)
RATES = st.floats(0.0, 0.99)


def walk(items, kept, reference):
    """The last kept of each cell, item after item: yields (item, cell, what is shown, what was last kept)."""
    last = reference
    for i, values in enumerate(items):
        for c, value in enumerate(values):
            yield i, c, value, None if last is None else last[c]
        last = [v if last is None or c in kept[i] else last[c] for c, v in enumerate(values)]


@settings(deadline=None, max_examples=150)
@given(CLIPS, RATES, st.none() | st.lists(st.sampled_from([90, 97, 160]), min_size=12, max_size=12))
def test_only_what_differs_little_from_the_last_kept_is_left_out_within_the_rate(spec, clip, rate, before):
    items = [still(frame(spec, np.array(values).reshape(GRID))) for values in clip]
    reference = None
    if before is not None:
        reference = prune([still(frame(spec, np.array(before).reshape(GRID)))], spec, 0.0).reference
    pruned = prune(items, spec, rate, reference)
    kept = kept_cells(pruned)
    assert sum(12 - len(own) for own in kept) <= rate * 12 * len(clip)
    assert all(kept)
    assert before is not None or len(kept[0]) == 12
    for own in (own for own in pruned.kept if own is not None):
        assert own.dtype == np.int32
        assert (np.diff(own) > 0).all()
        assert 0 < len(own) < 12
    for i, c, value, last in walk(clip, kept, before):
        assert c in kept[i] or abs(value - last) < VISIBLE
    again = prune([item.copy() for item in items], spec, rate, reference)
    assert kept_cells(again) == kept
    assert (again.reference == pruned.reference).all()


@settings(deadline=None, max_examples=60)
@given(CLIPS)
def test_item_after_item_is_as_all_at_once_where_the_rate_is_no_bound(spec, clip):
    """As a camera's frames come: each with what the one before has left."""
    items = [still(frame(spec, np.array(values).reshape(GRID))) for values in clip]
    whole = prune(items, spec, 0.999)
    reference, kept = None, []
    for item in items:
        one = prune([item], spec, 0.999, reference)
        reference = one.reference
        kept += kept_cells(one)
    assert sum(12 - len(own) for own in kept) <= 0.999 * 12 * len(items)
    assert kept == kept_cells(whole)
    assert (reference == whole.reference).all()


def test_what_was_kept_of_another_size_is_no_reference(spec):
    small = still(np.zeros((cell(spec), cell(spec), 3), np.uint8))
    reference = prune([small], spec, 0.5).reference
    assert prune([still(flat(spec))], spec, 0.9, reference).kept == (None,)


# ---------------------------------------------------------------- what becomes of a clip


def moving(spec, count=6, size=(96, 160)):
    """Frames of a square that wanders over a scene that is at rest."""
    scene = np.random.default_rng(3).integers(0, 200, (*size, 3), np.uint8)
    frames = np.repeat(scene[None], 2 * count, 0)
    for i, shown in enumerate(frames):
        at = 6 * i % (size[1] - 20)
        shown[30:50, at : at + 20] = 255
    return frames


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request, specs):
    return Processor(specs[request.param], MediaOptions())


def clip(spec, rate=None, **fields):
    return VideoPart(frames=moving(spec), video_pruning_rate=rate, **fields)


def test_a_rate_of_nothing_is_as_none(processor):
    spec = processor.spec
    plain, zero = (processor.prepare(chat_of(clip(spec, rate), TextPart("a"))) for rate in (None, 0.0))
    for name in ("token_ids", "radix_keys", "positions"):
        assert (getattr(plain.request, name) == getattr(zero.request, name)).all()
    assert plain.digests == zero.digests
    assert plain.seen == zero.seen
    assert all(item.kept is None for item in plain.request.items)


def test_what_is_kept_stands_where_it_does_in_the_whole_and_so_does_what_follows(processor):
    spec = processor.spec
    short = VideoPart(frames=moving(spec, 1))
    whole, pruned = (
        processor.prepare(
            chat_of(TextPart("a b"), clip(spec, rate), TextPart("which one"), short, TextPart("is larger"))
        )
        for rate in (0.0, 0.7)
    )
    stays = np.ones(whole.request.num_tokens, bool)
    for item, other in zip(whole.request.items, pruned.request.items, strict=True):
        if other.kept is not None:
            own = np.zeros(item.span[1] - item.span[0], bool)
            own[other.kept] = True
            stays[slice(*item.span)] = own
        assert other.span[1] - other.span[0] == stays[slice(*item.span)].sum()
        assert other.span[0] == stays[: item.span[0]].sum()
        assert (other.digest == item.digest) is (other.kept is None)
        assert (other.pixels == item.pixels).all()
    assert 0.3 * len(stays) < stays.sum() < len(stays)
    request = pruned.request
    assert (request.token_ids == whole.request.token_ids[stays]).all()
    assert (request.positions == whole.request.positions[:, stays]).all()
    assert request.num_tokens + request.position_delta == len(stays) + whole.request.position_delta
    dropped = len(stays) - stays.sum()
    assert [s.dropped_tokens for s in pruned.seen] == [dropped, 0]
    assert pruned.video_tokens == whole.video_tokens - dropped
    assert pruned.video_tokens == (request.token_ids == spec.tokens.video).sum()


def test_keys_tell_masks_apart_and_begin_alike_where_nothing_was_left_out(processor):
    spec = processor.spec
    half, most = (processor.prepare(chat_of(clip(spec, rate))).request for rate in (0.3, 0.9))
    first = half.items[0].span
    assert (half.radix_keys[: first[1]] == most.radix_keys[: first[1]]).all(), "the first item is whole"
    again = processor.prepare(chat_of(clip(spec, 0.3))).request
    assert (again.radix_keys == half.radix_keys).all()
    pairs = list(zip(half.items, most.items, strict=True))[1:]
    assert any(a.digest != b.digest for a, b in pairs)
    for a, b in pairs:
        same = (a.kept is None and b.kept is None) or np.array_equal(a.kept, b.kept)
        assert (a.digest == b.digest) is same


def test_cells_that_were_chosen_before_give_the_same_item(processor):
    """A session keeps them, so that pixels which are asked for again are those of the item."""
    frames = moving(processor.spec, 2)
    first = processor.see(VideoPart(frames=frames[:2], video_pruning_rate=0.9))
    assert first.kept == ()
    assert first.reference is not None
    part = VideoPart(frames=frames[2:], video_pruning_rate=0.9, reference=first.reference)
    second = processor.see(part)
    again = processor.see(VideoPart(frames=frames[2:], kept=second.kept[0]))
    assert second.seen.dropped_tokens > 0
    assert again.digests == second.digests
    assert again.seen.tokens == second.seen.tokens
    assert again.reference is None
    assert processor.see(VideoPart(frames=frames[2:])).digests != second.digests


@pytest.mark.parametrize("kept", [[], [0, 0], [2, 1], [-1], [1 << 20], [[1]]])
def test_cells_that_no_item_has_are_refused(processor, kept):
    part = VideoPart(frames=moving(processor.spec, 1), kept=np.array(kept, np.int32))
    with pytest.raises(MediaError, match="were not chosen"):
        processor.see(part)


def test_cells_are_of_a_clip_of_one_item(processor):
    with pytest.raises(MediaError, match="of one item"):
        processor.see(clip(processor.spec, kept=np.array([0], np.int32)))


def test_what_is_configured_holds_where_a_request_says_nothing(specs):
    spec = specs["qwen3_vl"]
    processor = Processor(spec, MediaOptions(video_pruning_rate=0.6))
    told = [processor.see(clip(spec, rate)).seen.dropped_tokens for rate in (None, 0.6, 0.0)]
    assert told[0] == told[1] > told[2] == 0


@pytest.mark.parametrize("rate", [-0.1, 1.0, 7.0])
def test_a_configured_rate_is_a_share_below_one(rate):
    with pytest.raises(ConfigError, match="video_pruning_rate must be"):
        Config.of(video_pruning_rate=rate)


def test_pictures_are_never_pruned(processor):
    assert processor.see(picture()).kept == ()


def test_early_answers_count_what_they_keep_of_masks(processor):
    medium = processor.see(clip(processor.spec, 0.8))
    plain = processor.see(clip(processor.spec, 0.0))
    sizes = []
    for one in (plain, medium):
        answers = EarlyAnswers(1 << 20, 0)
        answers.keep(b"key", one, pixels=False)
        sizes.append(answers.stats()["early_answers_bytes"])
    assert sizes[1] - sizes[0] >= sum(own.nbytes for own in medium.kept if own is not None)
