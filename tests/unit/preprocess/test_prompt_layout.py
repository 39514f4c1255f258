"""Placeholders to spans, keys and positions."""

import numpy as np
import pytest

from mmserve.core.errors import InvalidRequest
from mmserve.preprocess.layout import item_keys, lay_out, radix_keys
from mmserve.preprocess.media import Medium

DIGEST = bytes(range(32))


def medium(kind="image", grid=(4, 6), items=1, digest=DIGEST, seconds=1.0):
    times = tuple(float(i) for i in range(items)) if kind == "video" else ()
    pixels = tuple(np.zeros(0, np.uint8) for _ in range(items))
    return Medium(kind, grid, pixels, (digest,) * items, None, times, seconds)


def encode(text):
    return [ord(c) for c in text]


def test_an_image_takes_one_pad_a_merged_token(spec):
    t = spec.tokens
    layout = lay_out([1, t.vision_start, t.image, t.vision_end, 2], [medium()], spec, encode)
    assert layout.token_ids.tolist() == [1, t.vision_start, *[t.image] * 6, t.vision_end, 2]
    assert layout.token_ids.dtype == np.int32
    assert layout.spans == (((2, 8),),)


def test_qwen3_gives_each_pair_its_time(spec):
    t = spec.tokens
    layout = lay_out(
        [1, t.vision_start, t.video, t.vision_end, 2], [medium("video", (2, 2), 2)], spec, encode
    )
    pair = [t.vision_start, t.video, t.vision_end]
    assert layout.token_ids.tolist() == [
        1,
        *encode("<0.0 seconds>"),
        *pair,
        *encode("<1.0 seconds>"),
        *pair,
        2,
    ]
    assert [int(layout.token_ids[a]) for ((a, _), _) in [layout.spans[0]]] == [t.video]


def test_a_bare_video_placeholder_keeps_its_neighbours(spec):
    t = spec.tokens
    layout = lay_out([t.vision_start, t.video], [medium("video", (2, 2), 1)], spec, encode)
    assert layout.token_ids.tolist()[0] == t.vision_start


def test_older_families_give_a_clip_one_block(qwen2):
    t = qwen2.tokens
    layout = lay_out([t.vision_start, t.video, t.vision_end], [medium("video", (4, 4), 3)], qwen2, encode)
    assert layout.token_ids.tolist() == [t.vision_start, *[t.video] * 12, t.vision_end]
    assert layout.spans == (((1, 5), (5, 9), (9, 13)),)


def test_images_and_clips_are_taken_in_their_own_order(spec):
    t = spec.tokens
    media = [medium(grid=(2, 2)), medium("video", (2, 2), 1), medium(grid=(4, 4))]
    layout = lay_out([t.video, t.image, t.image], media, spec, encode)
    lengths = [[b - a for a, b in spans] for spans in layout.spans]
    assert lengths == [[1], [1], [4]]
    assert layout.spans[1][0] < layout.spans[0][0] < layout.spans[2][0]


@pytest.mark.parametrize(("places", "given"), [(0, 1), (2, 1), (1, 0)])
def test_placeholders_and_media_must_agree(spec, places, given):
    with pytest.raises(InvalidRequest, match="placeholders"):
        lay_out([spec.tokens.image] * places, [medium()] * given, spec, encode)


# ---------------------------------------------------------------- keys of the prefix tree


def keys_of(spec, one):
    pad = spec.tokens.image if one.kind == "image" else spec.tokens.video
    layout = lay_out([7, pad, 8], [one], spec, encode)
    return layout, radix_keys(layout, [one])


def test_keys_are_token_ids_except_under_an_item(spec):
    layout, keys = keys_of(spec, medium())
    ((start, end),) = layout.spans[0]
    outside = np.r_[0:start, end : len(keys)]
    assert keys.dtype == np.int64
    assert (keys[outside] == layout.token_ids[outside]).all()
    assert (keys[start:end] >= 1 << 62).all()


def test_keys_of_other_pictures_never_meet():
    rng = np.random.default_rng(0)
    keys = [item_keys(rng.bytes(32), 64) for _ in range(200)]
    assert len(np.unique(np.concatenate(keys))) == 200 * 64
    assert (item_keys(DIGEST, 10) == item_keys(DIGEST, 20)[:10]).all()


def test_keys_know_the_time_step_where_positions_depend_on_it(tmp_path):
    from helpers.tiny_folder import write_folder

    from mmserve.preprocess.spec import ProcessorSpec

    spec = ProcessorSpec.load(write_folder(tmp_path, "qwen2_5_vl"))
    slow, fast = medium("video", (4, 4), 3, seconds=2.0), medium("video", (4, 4), 3, seconds=1.0)
    assert (keys_of(spec, slow)[1] == keys_of(spec, slow)[1]).all()
    assert (keys_of(spec, slow)[1] != keys_of(spec, fast)[1]).any()
    assert keys_of(spec, slow)[1][1] != keys_of(spec, slow)[1][5]
