import numpy as np
import pytest
from PIL import Image

from mmserve.chat_format import LOW_DETAIL_PIXELS, MediaRef, media_refs, parse_messages
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ImagePart, TextPart, VideoPart


def forbidden(ref):
    raise AssertionError(f"nothing to load, yet asked for {ref}")


def test_plain_strings_and_roles():
    system, user = parse_messages(
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "ada"}],
        forbidden,
    )
    assert (system.role, system.content) == ("system", (TextPart("Be brief."),))
    assert (user.role, user.extra) == ("user", {"name": "ada"})


def test_media_refs_come_in_order_and_fill_the_parts():
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Compare"},
                {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "low"}},
                {"type": "video_url", "video_url": "clip.mp4", "fps": 4, "num_frames": 8},
                {"type": "image", "image": "cat.jpg", "max_pixels": 1024},
            ],
        }
    ]
    refs = media_refs(messages)
    assert refs == (
        MediaRef("image", "https://a/b.png", "messages[0].content[1].image_url"),
        MediaRef("video", "clip.mp4", "messages[0].content[2].video_url"),
        MediaRef("image", "cat.jpg", "messages[0].content[3].image"),
    )
    blobs = {ref: ref.source.encode() for ref in refs}
    (message,) = parse_messages(messages, blobs.__getitem__)
    text, url, clip, file = message.content
    assert text == TextPart("Compare")
    assert (url.data, url.max_pixels) == (b"https://a/b.png", LOW_DETAIL_PIXELS)
    assert isinstance(clip, VideoPart)
    assert (clip.data, clip.fps, clip.num_frames) == (b"clip.mp4", 4.0, 8)
    assert isinstance(file, ImagePart)
    assert (file.data, file.max_pixels) == (b"cat.jpg", 1024)


@pytest.mark.parametrize("mode", ["L", "RGB", "P"])
def test_pil_pictures_become_rgb_pixels(mode):
    picture = Image.new("RGB", (5, 4), (204, 204, 204)).convert(mode)
    (message,) = parse_messages(
        [{"role": "user", "content": [{"type": "image", "image": picture}]}], forbidden
    )
    assert message.content[0].pixels.shape == (4, 5, 3)
    assert (message.content[0].pixels == 204).all()


def test_transparent_pixels_stand_on_white():
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0, 3] = 255
    (message,) = parse_messages([{"role": "user", "content": [{"type": "image", "image": rgba}]}], forbidden)
    assert message.content[0].pixels[:, :, 0].tolist() == [[0, 255], [255, 255]]


def test_frames_of_a_clip_with_their_times():
    clip = {"type": "video", "video": [Image.new("RGB", (4, 4))] * 3, "timestamps": [0, 0.5, 1]}
    (message,) = parse_messages([{"role": "user", "content": [clip]}], forbidden)
    assert message.content[0].frames.shape == (3, 4, 4, 3)
    assert message.content[0].timestamps == (0.0, 0.5, 1.0)


def test_an_assistant_turn_of_tool_calls_needs_no_content():
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [{"id": "1"}]}], forbidden)
    assert message.content == ()
    assert message.extra == {"tool_calls": [{"id": "1"}]}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("hello", "messages"),
        ([], "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            ],
            "messages[1].content[0].image_url",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "u", "detail": "best"}}],
                }
            ],
            "messages[0].content[0].image_url.detail",
        ),
        ([{"role": "user", "content": [{"type": "image", "image": 7}]}], "messages[0].content[0].image"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "u", "max_pixels": -1}]}],
            "messages[0].content[0].max_pixels",
        ),
        *(
            (
                [{"role": "user", "content": [{"type": "video", "video": "u", name: value}]}],
                f"messages[0].content[0].{name}",
            )
            for name in ("fps", "num_frames", "max_pixels")
            for value in (float("nan"), float("inf"), 10**400)
        ),
        (
            [{"role": "user", "content": [{"type": "video", "video": np.zeros((2, 2, 3), np.uint8)}]}],
            "messages[0].content[0].video",
        ),
    ],
)
def test_errors_name_the_field(messages, param):
    with pytest.raises(InvalidRequest) as caught:
        parse_messages(messages, lambda ref: b"")
    assert caught.value.param == param
