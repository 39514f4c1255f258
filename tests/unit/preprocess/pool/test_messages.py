"""What is sent arrives, whatever a caller put into it; what a worker makes up does nothing."""

import numpy as np
import pytest
from helpers.preparing import chat_of
from helpers.tiny_folder import write_folder
from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.arena import Arena
from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest, MediaError
from mmserve.core.messages import ImagePart, Message, TextPart, VideoPart
from mmserve.core.wire import PREFIX_BYTES
from mmserve.preprocess.pool.bulk import loaded, luggage, unloaded
from mmserve.preprocess.pool.messages import (
    Hello,
    LaidOut,
    LayOut,
    Ready,
    from_worker,
    to_bytes,
    to_worker,
)
from mmserve.preprocess.pool.plain import plain_chat
from mmserve.preprocess.prompt import Prompt
from mmserve.preprocess.spec import ProcessorSpec


def sent(message, read=to_worker):
    data = to_bytes(message)
    assert int.from_bytes(data[:PREFIX_BYTES], "little") == len(data) - PREFIX_BYTES
    return read(data[PREFIX_BYTES:])


def test_a_worker_learns_all_that_the_model_s_folder_says(tmp_path):
    hello = Hello(True, ProcessorSpec.load(write_folder(tmp_path)), MediaOptions(), 1 << 20, 1 << 30)
    assert sent(hello) == hello


def test_a_prompt_s_arrays_arrive_as_they_were():
    arrays = np.arange(5, dtype=np.int32), np.arange(5) << 60, np.ones((3, 5), np.int32)
    prompt = Prompt(*arrays, -2, (((0, 1),), ()), {"layout": 0.5})
    came = sent(LaidOut(prompt, 1, 2, 7), from_worker).prompt
    for ours, theirs in zip(arrays, (came.token_ids, came.radix_keys, came.positions), strict=True):
        assert (ours.dtype, ours.tolist()) == (theirs.dtype, theirs.tolist())
        assert not theirs.flags.writeable
    assert (came.position_delta, came.spans, came.stages) == (-2, (((0, 1),), ()), {"layout": 0.5})


@pytest.mark.parametrize("body", [b"", b"junk", b"\x80", to_bytes(Ready())[PREFIX_BYTES:] + b"\0"])
def test_what_is_no_message_is_a_value_error(body):
    with pytest.raises(ValueError):  # noqa: PT011 (msgspec's own words)
        from_worker(body)


TEXTS = st.text(st.characters(codec=None))  # lone surrogates too, which JSON can carry
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS | st.integers(), inner),
    max_leaves=20,
)


def mended(value):
    """``value`` as the template sees it: keys are strings, and strings have a UTF-8 form."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [mended(v) for v in value]
    return {mended(str(k)): mended(v) for k, v in value.items()} if isinstance(value, dict) else value


@given(VALUES, TEXTS)
def test_a_template_sees_what_the_caller_wrote(value, text):
    came = sent(LayOut(1, plain_chat(chat_of(TextPart(text), template_kwargs={"value": value})), ())).chat
    assert came.messages[0].content[0].text == mended(text)
    assert came.template_kwargs == {"value": mended(value)}


def test_objects_are_told_by_their_type_as_a_template_would_see_them():
    chat = chat_of(TextPart("x"), template_kwargs={"a": object(), "b": {1: b"x"}, "big": 10**30})
    came = sent(LayOut(1, plain_chat(chat), ())).chat
    assert came.template_kwargs == {"a": "<object>", "b": {"1": "<bytes>"}, "big": 10**30}


def test_no_media_are_sent_with_words():
    picture = ImagePart(data=bytes(10_000), min_pixels=5)
    clip = VideoPart(pictures=(bytes(10_000),), frames=np.zeros((1, 9, 9, 3), np.uint8))
    message = LayOut(1, plain_chat(chat_of(picture, clip, TextPart("x"))), ())
    assert len(to_bytes(message)) < 1000
    assert sent(message).chat.messages == (
        Message("user", (ImagePart(min_pixels=5), VideoPart(), TextPart("x"))),
    )


def test_raw_prompts_are_text_or_token_ids():
    for prompt in ("", "a\ud800", (1, 2, -3), None):
        came = sent(LayOut(1, plain_chat(chat_of(prompt=prompt)), ())).chat
        assert came.prompt == mended(prompt)
    with pytest.raises(InvalidRequest, match="no token"):
        plain_chat(chat_of(prompt=(1, 10**30)))


def test_nesting_without_end_is_refused():
    deep = []
    deep.append(deep)
    with pytest.raises(InvalidRequest, match="nested"):
        plain_chat(chat_of(TextPart("x"), template_kwargs={"deep": deep}))


@pytest.mark.parametrize(
    "part",
    [
        ImagePart(data=b"file", param="p"),
        ImagePart(data=b""),
        ImagePart(pixels=np.arange(24, dtype=np.uint8).reshape(2, 4, 3), max_pixels=9),
        ImagePart(pixels=np.arange(48, dtype=np.uint8).reshape(4, 4, 3)[::2, ::-1]),
        VideoPart(frames=np.arange(36, dtype=np.uint8).reshape(1, 3, 4, 3), timestamps=(0.0,)),
        VideoPart(pictures=(b"one", b"", b"three"), fps=2.0),
        VideoPart(),
    ],
    ids=lambda part: "",
)
def test_bulk_goes_through_the_arena_and_comes_out_as_it_was(part):
    arena = Arena(4096)
    load = luggage(part)
    block = arena.allocate(load.nbytes)
    places = load.places(block.offset)
    for place, (_, data, _) in zip(places, load.entries, strict=True):
        arena.write(block, data, place.offset - block.offset)
    again = loaded(unloaded(part), places, arena.window)
    for name in part.__struct_fields__:
        ours, theirs = getattr(part, name), getattr(again, name)
        if isinstance(ours, np.ndarray):
            assert (ours == theirs).all()
            assert not theirs.flags.writeable
        else:
            assert ours == theirs


def test_pixels_of_another_kind_are_refused():
    with pytest.raises(MediaError, match="uint8, not float32"):
        luggage(ImagePart(pixels=np.zeros((2, 2, 3), np.float32)))
