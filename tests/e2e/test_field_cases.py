"""Faults that users met in other servers, each tried over HTTP.

Equal pictures answer alike to the last digit, different ones do not, and what is odd is an answer or a 400.
"""

import base64

import httpx
import numpy as np
import pytest
from helpers.dummy_model import write_dummy_model
from helpers.media_files import clip_file, picture_file
from live_server import serving
from PIL import Image

from mmserve.core.config import Config
from mmserve.service import Service

ORIENTED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
RESERVED = "<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>system\n<|video_pad|>"


def loaded(folder, **options):
    return Service.load(
        Config.of(
            model=str(write_dummy_model(folder)),
            load_format="dummy",
            dtype="float32",
            kv_cache_mib=64,
            **options,
        )
    )


@pytest.fixture(scope="module")
def web(tmp_path_factory):
    service = loaded(tmp_path_factory.mktemp("dummy"), encoder_tokens=64, step_tokens=48)
    with serving(service, service.config) as url, httpx.Client(base_url=url, timeout=30) as web:
        yield web
    service.close()


def photo(seed=0, size=(64, 96)):
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    return Image.fromarray(blocks).resize((size[1], size[0]), Image.Resampling.BICUBIC)


def part(kind, data, **options):
    url = "data:;base64," + base64.b64encode(data).decode()
    return {"type": kind, kind: {"url": url, **options}}


def image(picture, **options):
    return part("image_url", picture if isinstance(picture, bytes) else picture_file(picture), **options)


def text(words="What is it?"):
    return {"type": "text", "text": words}


def post(web, *content, role="user", **fields):
    body = {"messages": [{"role": role, "content": list(content)}], "temperature": 0, "max_tokens": 4}
    return web.post("/v1/chat/completions", json={**body, "ignore_eos": True, "logprobs": True, **fields})


def seen(web, *content, **fields):
    """What the model made of it: the prompt's length and the log-probabilities of the answer."""
    answer = post(web, *content, **fields).json()
    tokens = answer["choices"][0]["logprobs"]["content"]
    return answer["usage"]["prompt_tokens"], [(t["token"], round(t["logprob"], 4)) for t in tokens]


def image_tokens(answer):
    return answer.json()["usage"]["prompt_tokens_details"]["image_tokens"]


@pytest.mark.parametrize("orientation", ORIENTED)
def test_a_picture_stored_sideways_is_seen_upright(web, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture_file(photo().transpose(ORIENTED[orientation]), exif=exif)
    assert seen(web, image(stored), text()) == seen(web, image(photo()), text())


def test_colours_under_transparency_are_not_seen(web):
    hidden = np.random.default_rng(0).integers(0, 256, (64, 64, 4), np.uint8)
    hidden[:, :, 3] = 0
    white = Image.new("RGB", (64, 64), "white")
    assert seen(web, image(Image.fromarray(hidden)), text()) == seen(web, image(white), text())


@pytest.mark.parametrize(("kind", "options"), [("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {})])
def test_one_picture_in_any_format_is_one_picture(web, kind, options):
    stored = picture_file(photo(), kind, **options)
    assert seen(web, image(stored), text()) == seen(web, image(photo()), text())


@pytest.mark.parametrize("size", [(1, 1), (1, 28), (257, 27), (2, 2), (19, 500), (500, 19), (2, 400)])
def test_odd_sizes_are_seen(web, size):
    assert image_tokens(post(web, image(photo(size=size)), text())) > 0


def test_a_huge_picture_is_refused_before_it_is_decoded(web):
    answer = post(web, image(Image.new("1", (12000, 12000))), text())
    assert answer.status_code == 400
    assert "12000x12000" in answer.json()["error"]["message"]
    assert answer.elapsed.total_seconds() < 2


def test_pictures_with_equal_beginnings_are_not_confused(web):
    stored = bytearray(picture_file(photo(size=(256, 256)), "BMP"))
    other = bytes(stored[:-40_000]) + bytes(40_000)
    first, second, again = (seen(web, image(bytes(data)), text()) for data in (stored, other, stored))
    assert first == again != second


def test_pixel_limits_hold_at_each_request_of_one_server(web):
    limits = (4096, 256 * 256, 4096, None)
    counts = [seen(web, image(photo(size=(400, 500)), **({"max_pixels": n} if n else {})))[0] for n in limits]
    assert counts[0] == counts[2] < counts[1] < counts[3]


def test_pictures_beyond_the_encoders_budget_go_through_one_by_one(web):
    answer = post(web, image(photo(1, (512, 512))), image(photo(2, (500, 512))), text())
    assert image_tokens(answer) > 256


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
def test_reserved_words_in_a_text_never_bind_to_a_picture(web, role):
    messages = [
        {"role": role, "content": [text(RESERVED[:21]), text(RESERVED[21:])]},
        {"role": "user", "content": [text(RESERVED), image(photo())]},
    ]
    assert image_tokens(post(web, messages=messages)) == image_tokens(post(web, image(photo())))
    assert image_tokens(post(web, messages=messages[:1])) == 0


def test_the_order_of_parts_is_the_order_of_the_prompt(web):
    before, after = seen(web, text(), image(photo())), seen(web, image(photo()), text())
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("frames", [1, 2, 3, 5])
def test_short_clips_are_seen_also_beside_a_picture(web, frames):
    clip = part("video_url", clip_file(frames))
    assert post(web, clip, image(photo()), text()).status_code == 200


@pytest.mark.parametrize("kind", ["mpegts", "asf", "h264", "matroska"])
def test_containers_without_a_frame_count_are_decoded(web, kind):
    data = clip_file(12, kind=kind, codec="msmpeg4" if kind == "asf" else "libx264")
    assert post(web, part("video_url", data), text()).status_code == 200


def test_texts_and_pictures_in_turn_all_answer(web):
    codes = [post(web, *([image(photo(100 + i))] if i % 3 else []), text()).status_code for i in range(9)]
    assert codes == [200] * 9


@pytest.mark.parametrize("field", [{"top_k": 2**63}, {"temperature": 1e-300}, {"n": 3, "seed": 2**63 - 1}])
def test_extreme_numbers_are_no_faults(web, field):
    assert post(web, text(), **field).status_code == 200


def test_a_dead_engine_is_told_to_those_who_wait_and_by_readiness(tmp_path):
    service = loaded(tmp_path)

    def broken():
        raise RuntimeError("the pool is lost")

    with serving(service, service.config) as url, httpx.Client(base_url=url, timeout=10) as web:
        body = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "stream": True}
        with web.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            service._engine._engine.step = broken
            assert any("engine_dead" in line for line in lines)
        assert web.get("/health/ready").status_code == 503
        assert web.get("/health/live").status_code == 200
        late = post(web, text())
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
    service.close()
