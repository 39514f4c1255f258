import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from mmserve.chat_format import FORMS, MOST_ENTRIES, Loaded, MediaRef, media_refs, parse_messages
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ImagePart, TextPart, VideoPart
from mmserve.media_options import LOW_DETAIL_PIXELS, request_options


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
                {"type": "video_url", "video_url": "clip.mp4", "num_frames": 8},
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
    blobs = {ref: Loaded(ref.source.encode()) for ref in refs}
    (message,) = parse_messages(messages, blobs.__getitem__)
    text, url, clip, file = message.content
    assert text == TextPart("Compare")
    assert (url.data, url.max_pixels) == (b"https://a/b.png", LOW_DETAIL_PIXELS)
    assert isinstance(clip, VideoPart)
    assert (clip.data, clip.num_frames) == (b"clip.mp4", 8)
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
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
    (message,) = parse_messages([{"role": "assistant", "tool_calls": [call]}], forbidden)
    assert message.content == ()
    assert message.extra["tool_calls"][0]["function"] == {"name": "look", "arguments": {"x": 1}}


def test_a_call_that_no_template_could_write_is_named():
    call = {"function": {"name": "look", "arguments": "{"}}
    with pytest.raises(InvalidRequest) as refusal:
        parse_messages([{"role": "assistant", "tool_calls": [call]}], forbidden)
    assert refusal.value.param == "messages[0].tool_calls[0].function.arguments"


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
            for name in ("fps", "num_frames", "max_pixels", "video_pruning_rate")
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
        parse_messages(messages, lambda ref: Loaded(b""))
    assert caught.value.param == param


# ---------------------------------------------------------------- shapes that clients send

RAW = "AAAA"
URL = f"data:image/png;base64,{RAW}"


def parsed(part, loader=None, **kwargs):
    (message,) = parse_messages(
        [{"role": "user", "content": [part]}], loader or (lambda ref: Loaded(b"found")), **kwargs
    )
    return message.content[0]


def refs_of(part):
    return media_refs([{"role": "user", "content": [part]}])


@pytest.mark.parametrize(
    ("part", "kind", "source", "field"),
    [
        ({"type": "image_url", "image_url": URL}, "image", URL, "image_url"),
        ({"type": "image_url", "image_url": {"url": URL}}, "image", URL, "image_url"),
        (
            {"type": "input_image", "image_url": URL, "detail": "auto", "file_id": None},
            "image",
            URL,
            "image_url",
        ),
        ({"type": "input_image", "image_url": {"url": URL}}, "image", URL, "image_url"),
        ({"type": "image", "image": URL}, "image", URL, "image"),
        ({"type": "image", "url": URL}, "image", URL, "url"),
        ({"type": "video_url", "video_url": {"url": URL}}, "video", URL, "video_url"),
        (
            {"type": "video_url", "video_url": URL, "cache_control": {"type": "ephemeral"}},
            "video",
            URL,
            "video_url",
        ),
        ({"type": "input_video", "video_url": URL}, "video", URL, "video_url"),
        ({"type": "input_video", "input_video": {"data": URL}}, "video", URL, "input_video"),
        (
            {"type": "input_video", "input_video": {"data": RAW, "format": "webm"}},
            "video",
            f"data:video/webm;base64,{RAW}",
            "input_video",
        ),
        ({"type": "input_video", "input_video": RAW}, "video", f"data:video/mp4;base64,{RAW}", "input_video"),
    ],
)
def test_every_shape_of_a_reference(part, kind, source, field):
    assert refs_of(part) == (MediaRef(kind, source, f"messages[0].content[0].{field}"),)
    assert parsed(part).data == b"found"
    assert parsed(part).param == f"messages[0].content[0].{field}"


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_every_shape_of_a_text(kind):
    assert parsed({"type": kind, "text": "hi"}) == TextPart("hi")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": [URL, "https://a/b.png"]},
        {"type": "video", "video": [{"url": URL}, {"url": "https://a/b.png"}]},
        {"type": "video_url", "video_url": [URL, "https://a/b.png"]},
        {"type": "video_url", "video_url": {"frames": [URL, "https://a/b.png"]}},
        {"type": "video_url", "video_url": {"url": [URL, "https://a/b.png"]}},
    ],
)
def test_a_list_of_pictures_declared_as_video_is_a_clip(part):
    assert [(ref.kind, ref.source, ref.frame) for ref in refs_of(part)] == [
        ("image", URL, 0),
        ("image", "https://a/b.png", 1),
    ]
    clip = parsed({**part, "timestamps": [0, 2]}, lambda ref: Loaded(ref.source.encode()))
    assert clip.pictures == (URL.encode(), b"https://a/b.png")
    assert (clip.data, clip.frames, clip.timestamps) == (None, None, (0.0, 2.0))


def test_a_data_url_of_frames_is_a_clip_of_pictures():
    clip = parsed(
        {"type": "video_url", "video_url": "data:video/jpeg;base64,QQ,Qg"}, lambda ref: Loaded((b"A", b"B"))
    )
    assert (clip.pictures, clip.data) == ((b"A", b"B"), None)


def test_encoded_frames_are_a_clip_offline(tmp_path):
    clip = parsed({"type": "video", "video": [b"one", tmp_path / "two.png"]}, lambda ref: Loaded(b"two"))
    assert clip.pictures == (b"one", b"two")


# ---------------------------------------------------------------- what was sent before


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None, "uuid": "mine"},
        {"type": "image_url", "image_url": {"url": None}, "uuid": "mine"},
        {"type": "image_url", "uuid": "mine"},
        {"type": "input_image", "image_url": None, "file_id": None, "uuid": "mine"},
    ],
)
def test_a_uuid_alone_stands_for_what_it_named_before(part):
    assert refs_of(part) == (MediaRef("image", None, "messages[0].content[0].image_url", uuid="mine"),)


def test_a_uuid_beside_a_source_names_it():
    (ref,) = refs_of({"type": "video_url", "video_url": URL, "uuid": "mine"})
    assert (ref.source, ref.uuid) == (URL, "mine")


@pytest.mark.parametrize(
    ("part", "kind", "field"),
    [
        ({"type": "media", "media_id": "media-1"}, None, "media_id"),
        ({"type": "input_image", "file_id": "media-1"}, "image", "file_id"),
        ({"type": "input_image", "file_id": "media-1", "image_url": None}, "image", "file_id"),
        ({"type": "input_video", "file_id": "media-1"}, "video", "file_id"),
    ],
)
def test_stored_media_are_named_by_id(part, kind, field):
    assert refs_of(part) == (MediaRef(kind, None, f"messages[0].content[0].{field}", media_id="media-1"),)


def test_what_is_stored_decides_what_a_media_part_is():
    part = {"type": "media", "media_id": "media-1", "fps": 3}
    clip = parsed(part, lambda ref: Loaded(b"x", "video", {"max_pixels": 7, "num_frames": 4}))
    assert clip == VideoPart(data=b"x", fps=3.0, max_pixels=7, param="messages[0].content[0].media_id")
    with pytest.raises(InvalidRequest, match="fps is for a clip, and this is a picture"):
        parsed(part, lambda ref: Loaded(b"x", "image"))


def test_stored_media_of_the_other_kind_are_refused():
    with pytest.raises(InvalidRequest, match="stored video") as caught:
        parsed({"type": "input_image", "file_id": "media-1"}, lambda ref: Loaded(b"x", "video"))
    assert caught.value.param == "messages[0].content[0].file_id"


# ---------------------------------------------------------------- options, from near to far


def test_the_nearest_word_holds():
    inner, beside, stored, request = 1000, 2000, 3000, 4000
    part = {"type": "image_url", "image_url": {"url": URL, "max_pixels": inner}, "max_pixels": beside}
    found = lambda ref: Loaded(b"x", "image", {"max_pixels": stored})  # noqa: E731
    defaults = request_options({"max_pixels": request}, None)
    seen = []
    for step in (lambda: part["image_url"].pop("max_pixels"), lambda: part.pop("max_pixels"), lambda: None):
        seen.append(parsed(part, found, defaults=defaults).max_pixels)
        step()
    seen.append(parsed(part, defaults=defaults).max_pixels)
    assert seen == [inner, beside, stored, request]


def test_a_nearer_rate_goes_before_a_farther_count():
    part = {"type": "video_url", "video_url": {"url": URL, "fps": 2}, "num_frames": 8}
    clip = parsed(part, defaults=request_options({"num_frames": 9}, None))
    assert (clip.fps, clip.num_frames) == (2.0, None)


def test_low_detail_is_a_limit_unless_one_is_given():
    part = {"type": "image_url", "image_url": URL, "detail": "low"}
    assert parsed(part).max_pixels == LOW_DETAIL_PIXELS
    assert parsed({**part, "max_pixels": 99}).max_pixels == 99
    assert parsed({**part, "detail": "high"}).max_pixels is None
    assert (
        parsed({"type": "video_url", "video_url": {"url": URL, "detail": "low"}}).max_pixels
        == LOW_DETAIL_PIXELS
    )


@pytest.mark.parametrize(
    ("processor", "io", "image", "video"),
    [
        (None, None, {}, {}),
        ({"max_pixels": 5, "fps": 2}, None, {"max_pixels": 5}, {"max_pixels": 5, "fps": 2.0}),
        (
            {"image": {"max_pixels": 5}, "video": {"num_frames": 3}},
            None,
            {"max_pixels": 5},
            {"num_frames": 3},
        ),
        ({"images_kwargs": {"max_pixels": 5}, "videos_kwargs": None}, {}, {"max_pixels": 5}, {}),
        ({"max_pixels": 9, "image": {"max_pixels": 5}}, None, {"max_pixels": 5}, {"max_pixels": 9}),
        ({"fps": 2, "video": {"num_frames": 3}}, None, {}, {"num_frames": 3}),
        (None, {"image": {"rgba_background_color": [1, 2, 3]}}, {"background": (1, 2, 3)}, {}),
        (None, {"video": {"num_frames": 3}}, {}, {"num_frames": 3}),
        ({"fps": 2}, {"video": {"num_frames": -1}}, {}, {"fps": 2.0}),
        ({"fps": 2}, {"video": {"fps": -1, "num_frames": 4}}, {}, {"num_frames": 4}),
        ({"video": {"fps": 2}}, {"video": {"fps": 2.0}}, {}, {"fps": 2.0}),
        ({"video_pruning_rate": 0.5}, None, {}, {"video_pruning_rate": 0.5}),
        (
            {"video_pruning_rate": 0.5, "video": {"video_pruning_rate": 0}},
            None,
            {},
            {"video_pruning_rate": 0.0},
        ),
        (None, {"video": {"video_pruning_rate": 0.25}}, {}, {"video_pruning_rate": 0.25}),
    ],
)
def test_options_of_a_request_flat_nested_and_of_either_field(processor, io, image, video):
    assert request_options(processor, io) == {"image": image, "video": video}


@pytest.mark.parametrize(
    ("processor", "io", "param", "says"),
    [
        ({"maxpixels": 1}, None, "mm_processor_kwargs.maxpixels", "max_pixels"),
        ({"size": {}}, None, "mm_processor_kwargs.size", "unknown"),
        ({"image": {"fps": 1}}, None, "mm_processor_kwargs.image.fps", "is for a clip"),
        ({"video_pruning_rate": 1}, None, "mm_processor_kwargs.video_pruning_rate", "below 1"),
        (
            {"video": {"video_pruning_rate": -0.1}},
            None,
            "mm_processor_kwargs.video.video_pruning_rate",
            "0 to",
        ),
        (
            {"image": {"video_pruning_rate": 0.5}},
            None,
            "mm_processor_kwargs.image.video_pruning_rate",
            "is for a clip",
        ),
        ({"video": {"frames": 1}}, None, "mm_processor_kwargs.video.frames", "num_frames"),
        ({"videos_kwargs": []}, None, "mm_processor_kwargs.videos_kwargs", "object"),
        ({"fps": 1, "num_frames": 2}, None, "mm_processor_kwargs.num_frames", "exclude"),
        ({"min_pixels": 9, "max_pixels": 2}, None, "mm_processor_kwargs.min_pixels", "exceed"),
        (None, {"num_frames": 1}, "media_io_kwargs.num_frames", "media_io_kwargs.video"),
        (None, {"audio": {}}, "media_io_kwargs.audio", "media_io_kwargs.image"),
        (
            None,
            {"image": {"rgba_background_color": [1, 2, 300]}},
            "media_io_kwargs.image.rgba_background_color",
            "255",
        ),
        ({"video": {"fps": 2}}, {"video": {"fps": 3}}, "media_io_kwargs.video.fps", "contradicts"),
        (
            {"video": {"fps": 2}},
            {"video": {"num_frames": 3}},
            "media_io_kwargs.video.num_frames",
            "contradicts",
        ),
        (
            {"image": {"max_pixels": 2}, "images_kwargs": {"max_pixels": 3}},
            None,
            "mm_processor_kwargs.images_kwargs.max_pixels",
            "contradicts",
        ),
    ],
)
def test_wrong_options_of_a_request_are_told_where_they_belong(processor, io, param, says):
    with pytest.raises(InvalidRequest, match=says) as caught:
        request_options(processor, io)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        (
            {"type": "image_url", "image_url": {"url": "u", "maxpixels": 1}},
            "image_url.maxpixels",
            "max_pixels",
        ),
        ({"type": "image_url", "image_url": "u", "resized_width": 1}, "resized_width", "max_pixels"),
        ({"type": "image_url", "image_url": "u", "fps": 1}, "fps", "for a clip"),
        ({"type": "video_url", "video_url": "u", "video_pruning_rate": "x"}, "video_pruning_rate", "below 1"),
        (
            {"type": "video_url", "video_url": "u", "video_pruning_rate": True},
            "video_pruning_rate",
            "below 1",
        ),
        ({"type": "video_url", "video_url": "u", "kept": [0]}, "kept", "is unknown"),
        ({"type": "video_url", "video_url": "u", "reference": []}, "reference", "is unknown"),
        (
            {"type": "video_url", "video_url": "u", "rgba_background_color": [0, 0, 0]},
            "rgba_background_color",
            "picture",
        ),
        (
            {"type": "video_url", "video_url": {"url": "u", "fps": 1, "num_frames": 2}},
            "video_url.num_frames",
            "exclude",
        ),
        (
            {"type": "image_url", "image_url": {"url": "u", "max_pixels": 5}, "min_pixels": 9},
            "image_url.min_pixels",
            "exceed",
        ),
        ({"type": "image_url", "image_url": "u", "max_pixels": 1.5}, "max_pixels", "whole"),
        ({"type": "image_url", "image_url": "u", "max_pixels": True}, "max_pixels", "whole"),
        ({"type": "image_url", "image_url": "u", "detail": ["low"]}, "detail", "auto, low or high"),
        ({"type": "image_url", "image_url": "u", "video_url": "v"}, "video_url", "unknown"),
        ({"type": "input_image", "image_url": "u", "file_id": "f"}, "file_id", "not both"),
        ({"type": "input_video", "input_video": {"format": "mp4"}}, "input_video", "missing"),
        ({"type": "input_video", "input_video": {"data": 3}}, "input_video.data", "base64"),
        (
            {"type": "input_video", "input_video": {"data": "x", "codec": "h264"}},
            "input_video.codec",
            "unknown",
        ),
        ({"type": "image_url", "image_url": ["u"]}, "image_url", "clip"),
        ({"type": "video", "video": ["u", 3]}, "video[1]", "URL"),
        ({"type": "video", "video": ["u"], "uuid": "x"}, "video", "one file"),
        ({"type": "image_url", "image_url": None}, "image_url", "missing"),
        ({"type": "image_url", "image_url": "u", "uuid": ""}, "uuid", "256"),
        ({"type": "image_url", "image_url": "u", "uuid": 7}, "uuid", "256"),
        ({"type": "media"}, "media_id", "missing"),
        ({"type": "media", "media_id": "x" * 300}, "media_id", "256"),
    ],
)
def test_wrong_parts_name_the_field_and_what_is_allowed(part, param, says):
    with pytest.raises(InvalidRequest, match=says) as caught:
        parsed(part)
    assert caught.value.param == f"messages[0].content[0].{param}"
    assert len(caught.value.message) < 400


def test_a_background_reaches_the_part_or_the_pixels():
    wanted = {"rgba_background_color": [10, 20, 30]}
    assert parsed({"type": "image_url", "image_url": {"url": URL, **wanted}}).background == (10, 20, 30)
    part = parsed({"type": "image", "image": np.zeros((1, 1, 4), np.uint8), **wanted})
    assert part.pixels.tolist() == [[[10, 20, 30]]]


# ---------------------------------------------------------------- anything at all

WORDS = st.sampled_from(
    "type image_url video_url url uuid text detail low fps media media_id data input_video input_image video"
    f" frames role user content {URL} max_pixels timestamps".split()
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), WORDS)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=12,
)
FIELDS = [
    *(
        "image_url",
        "video_url",
        "input_video",
        "image",
        "video",
        "url",
        "media_id",
        "file_id",
        "uuid",
        "text",
    ),
    *("fps", "num_frames", "min_pixels", "max_pixels", "detail", "timestamps", "rgba_background_color"),
    "video_pruning_rate",
]
PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from([*FORMS, "text", "sound"])}, optional=dict.fromkeys(FIELDS, TREES)
)


def refusal(work, *args):
    """The InvalidRequest that ``work`` ends with, if it does."""
    try:
        work(*args)
    except InvalidRequest as error:
        return error
    return None


def parse_fully(tree):
    refs = media_refs(tree)
    assert len({ref.param for ref in refs}) == len(refs)
    parse_messages(tree, lambda ref: Loaded(b"x", ref.kind or "image"))


@given(st.one_of(TREES, st.lists(PARTS, max_size=3).map(lambda parts: [{"role": "user", "content": parts}])))
@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_tree_is_messages_or_an_error_that_names_a_field(tree):
    error = refusal(parse_fully, tree)
    assert error is None or (error.param.startswith("messages") and len(error.message) < 1000)


@given(TREES, TREES)
@settings(max_examples=200, derandomize=True, deadline=None)
def test_any_tree_is_options_or_an_error_that_names_a_field(processor, io):
    error = refusal(request_options, processor, io)
    assert error is None or error.param.startswith(("mm_processor_kwargs", "media_io_kwargs"))


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "user", "content": "a"}] * (MOST_ENTRIES + 1), "messages"),
        ([{"role": "user", "content": ["a"] * (MOST_ENTRIES + 1)}], "messages[0].content"),
    ],
)
def test_more_entries_than_one_request_may_have_are_refused_unread(messages, param):
    with pytest.raises(InvalidRequest, match=str(MOST_ENTRIES)) as refusal:
        parse_messages(messages, lambda ref: b"")
    assert refusal.value.param == param
