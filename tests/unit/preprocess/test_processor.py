import numpy as np
import pytest
from helpers.media_files import clip_file, picture_file
from helpers.tiny_folder import token_ids, write_folder
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import ConfigError, InvalidRequest, MediaError
from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart, VideoPart
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

NOISE = np.random.default_rng(0).integers(0, 256, (100, 160, 3), np.uint8)


def chat(*parts, **fields):
    return ChatInput(request_id="r", messages=(Message("user", parts),), sampling=SamplingParams(), **fields)


def test_a_request_holds_together(processor):
    prepared = processor.prepare(
        chat(
            TextPart("a"),
            ImagePart(data=picture_file(NOISE)),
            TextPart("b"),
            VideoPart(data=clip_file(5)),
            priority=3,
            deadline=9.0,
            cache_salt="s",
        )
    )
    request = prepared.request
    n = request.num_tokens
    assert (request.token_ids.dtype, request.radix_keys.dtype, request.positions.dtype) == (
        np.int32,
        np.int64,
        np.int32,
    )
    assert request.radix_keys.shape == (n,)
    assert request.positions.shape == (3, n)
    assert request.position_delta == request.positions.max() + 1 - n
    assert (request.priority, request.deadline, request.cache_salt) == (3, 9.0, "s")
    assert [i.kind for i in request.items] == ["image", "video", "video"]
    for item in request.items:
        start, end = item.span
        assert end - start == item.grid[0] * item.grid[1] // 4
        assert item.pixels.shape == (item.pixels.shape[0], item.grid[0] * 16, item.grid[1] * 16, 3)
        assert item.pixels.shape[0] == (1 if item.kind == "image" else 2)
        assert not item.pixels.flags.writeable
        assert len(item.digest) == 32
    assert prepared.image_tokens == (request.token_ids == token_ids()["<|image_pad|>"]).sum()
    assert prepared.video_tokens == (request.token_ids == token_ids()["<|video_pad|>"]).sum()
    assert [i.timestamp is None for i in request.items] == [True, False, False]


def test_order_of_parts_is_the_order_of_the_prompt(processor):
    picture = ImagePart(data=picture_file(NOISE))
    first = processor.prepare(chat(picture, TextPart("Hello world"))).request
    last = processor.prepare(chat(TextPart("Hello world"), picture)).request
    assert first.items[0].span[0] < last.items[0].span[0]
    assert first.num_tokens == last.num_tokens


def test_what_was_seen_is_told(processor):
    exif = Image.Exif()
    exif[0x0112] = 6
    seen = processor.see(ImagePart(data=picture_file(NOISE, "JPEG", exif=exif.tobytes()))).seen
    assert (seen.kind, seen.format, seen.source_size, seen.orientation) == ("image", "JPEG", (160, 100), 6)
    assert seen.size == (seen.grid[0] * 16, seen.grid[1] * 16)
    assert seen.tokens == seen.grid[0] * seen.grid[1] // 4


def test_equal_pixels_have_equal_digests_however_they_came(processor):
    square = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    parts = [
        ImagePart(data=picture_file(square)),
        ImagePart(data=picture_file(square, "WEBP", lossless=True)),
        ImagePart(pixels=square),
    ]
    assert len({processor.see(p).digests for p in parts}) == 1
    other = square.copy()
    other[63, 63, 2] ^= 1
    assert processor.see(ImagePart(pixels=other)).digests != processor.see(parts[0]).digests


def test_a_still_and_a_still_clip_are_told_apart(processor):
    still = np.zeros((64, 64, 3), np.uint8)
    clip = processor.see(VideoPart(frames=np.stack([still, still])))
    assert clip.digests != processor.see(ImagePart(pixels=still)).digests


def test_limits_of_the_part_hold_each_time(processor):
    data = picture_file(np.zeros((300, 300, 3), np.uint8))
    sizes = [processor.see(ImagePart(data=data, max_pixels=m)).seen.tokens for m in (64 * 64, None, 64 * 64)]
    assert sizes == [4, 81, 4]
    assert processor.see(ImagePart(data=data, min_pixels=600 * 600)).seen.tokens >= 600 * 600 // 1024


@pytest.mark.parametrize(
    "fields", [{"max_pixels": 0}, {"min_pixels": -1}, {"min_pixels": 10, "max_pixels": 5}]
)
def test_wrong_limits_are_errors_with_the_parts_name(processor, fields):
    with pytest.raises(MediaError, match="pixels") as caught:
        processor.see(ImagePart(pixels=NOISE, param="messages[0].content[2]", **fields))
    assert caught.value.param == "messages[0].content[2]"


def test_enlarging_is_bounded(spec):
    processor = Processor(spec, MediaOptions(max_image_pixels=200 * 200))
    medium = processor.see(ImagePart(pixels=np.zeros((8, 8, 3), np.uint8), min_pixels=10**12))
    assert medium.nbytes <= 3 * 224 * 224


def test_errors_name_the_part(processor):
    for part in (
        ImagePart(data=b"junk", param="p"),
        VideoPart(data=b"junk", param="p"),
        ImagePart(param="p"),
        VideoPart(param="p"),
        ImagePart(data=picture_file(Image.new("RGB", (402, 2))), param="p"),
    ):
        with pytest.raises(MediaError) as caught:
            processor.prepare(chat(part))
        assert caught.value.param == "p"
        assert caught.value.status == 400


def test_too_many_items_and_empty_prompts(spec, processor, tmp_path):
    few = Processor(spec, MediaOptions(max_items=1))
    with pytest.raises(MediaError, match="at most 1"):
        few.prepare(chat(ImagePart(pixels=NOISE), ImagePart(pixels=NOISE)))
    with pytest.raises(InvalidRequest, match="empty"):
        processor.prepare(chat(prompt=""))
    with pytest.raises(ConfigError):
        Processor(spec, MediaOptions(background="mauve-ish"))


def test_a_raw_prompt_may_be_token_ids_that_exist(processor):
    ids = tuple(processor.tokenize("what<|im_end|>"))
    assert tuple(processor.prepare(chat(prompt=ids)).request.token_ids) == ids
    for wrong in (-1, processor.text.size, 2**70):
        with pytest.raises(InvalidRequest) as refusal:
            processor.prepare(chat(prompt=(*ids, wrong)))
        assert refusal.value.param == "prompt"


def test_raw_prompts_use_their_reserved_tokens(processor):
    prompt = "<|vision_start|><|image_pad|><|vision_end|>what<|im_end|>"
    request = processor.prepare(chat(ImagePart(pixels=NOISE), prompt=prompt, stop=("x",))).request
    assert request.items[0].span[0] == 1
    assert request.token_ids[-1] == token_ids()["<|im_end|>"]
    assert request.stop == ("x",)
    with pytest.raises(InvalidRequest, match="placeholders"):
        processor.prepare(chat(prompt=prompt))


def test_text_helpers(processor):
    ids = processor.tokenize("Hello žlutý 日本 é")
    assert processor.decode(ids) == "Hello žlutý 日本 é"
    assert processor.count("Hello") == len(processor.tokenize("Hello"))
    end = processor.tokenize("a<|im_end|>")
    assert processor.decode(end) == "a"
    assert processor.decode(end, skip_special_tokens=False) == "a<|im_end|>"


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_older_families_prepare_too(tmp_path, family):
    processor = Processor(ProcessorSpec.load(write_folder(tmp_path, family)), MediaOptions())
    request = processor.prepare(
        chat(ImagePart(pixels=NOISE), VideoPart(data=clip_file(8)), TextPart("x"))
    ).request
    spans = [i.span for i in request.items]
    assert [i.kind for i in request.items] == ["image", *["video"] * 2]
    assert spans[1][1] == spans[2][0]
