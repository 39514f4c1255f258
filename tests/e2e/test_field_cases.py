"""Faults that users met in other servers, each tried over HTTP.

Equal pictures answer alike to the last digit, different ones do not, and what is odd is an answer or a 400.

    fault elsewhere                          tests here, and where the kind is tried further
    ---------------------------------------  -----------------------------------------------------------------
     1  sideways photos                      stored_sideways; preprocess/test_image.py: in each format
     3  colours under transparency           colours_under_transparency, the_background_may_be_chosen
     5  WebP refused or dropped              one_picture_in_any_format
     7  a bare 500 for a dead URL            urls_that_do_not_answer; preprocess/test_source_web.py: TLS
     9  one bad picture blocks all           bad_pictures_among_good_ones
    11  huge PNGs, base64 in the log         a_huge_picture; test_server.py: no_base64_is_in_the_log
    13  sizes that crash                     odd_sizes
    15  narrow pictures                      odd_sizes
    17  data URL taken for base64            raw_clips; test_chat_format.py: every_shape_of_a_reference
    19  private addresses fetched            private_addresses; preprocess/test_source_web.py: spellings, hops
    21  the first picture's answer           pictures_in_turn_answer_as_they_do_alone
    23  equal beginnings                     equal_beginnings
    25  pixel limits not applied             pixel_limits_hold
    27  a uuid's stale picture               a_uuid_never_gives_a_stale_answer; test_server.py: uuids
    30  a picture whose sender leaves        others_finish_when_some_leave
    31  two pictures beyond the budget       beyond_the_encoders_budget
    32  reserved words bind to pictures      reserved_words
    34  the order of parts lost              order_of_parts
    36  picture and clip in one turn         short_clips
    39  a system prompt beside a picture     system_turn
    41  limits in some places ignored        a_limit_is_honoured_wherever_it_stands, too_long_a_prompt
    42  clips of one frame                   short_clips
    44  a frame that cannot be read          damaged_clips; cut_off; preprocess/test_video.py
    46  no frame count                       containers_without_a_frame_count, animations_as_clips
    48  num_frames without fps               a_rate_or_a_number_of_frames
"""

import base64
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
def service(tmp_path_factory):
    service = loaded(tmp_path_factory.mktemp("dummy"), encoder_tokens=64, step_tokens=48)
    yield service
    service.close()


@pytest.fixture(scope="module")
def web(service):
    with serving(service, service.config) as url, httpx.Client(base_url=url, timeout=60) as web:
        yield web


@pytest.fixture(scope="module")
def local(service):
    """The same service where private addresses may be fetched, with short times."""
    config = Config.of(allow_private_urls=True, fetch_idle_s=0.5, drain_s=1)
    with serving(service, config) as url, httpx.Client(base_url=url, timeout=60) as web:
        yield web


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


def what_was_seen(web, *content, **fields):
    """The report on each picture and clip, and the warnings."""
    answer = post(web, *content, include=["media"], **fields)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage["prompt_tokens_details"]
    assert sum(details[f"{kind}_tokens"] for kind in ("text", "image", "video")) == usage["prompt_tokens"]
    return answer.json()["media"], answer.json().get("warnings", [])


def error_of(answer):
    return answer.json()["error"]


def memory():
    """Bytes that this process, and so the server, has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def image_tokens(answer):
    return answer.json()["usage"]["prompt_tokens_details"]["image_tokens"]


@pytest.mark.parametrize("orientation", ORIENTED)
def test_a_picture_stored_sideways_is_seen_upright(web, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture_file(photo().transpose(ORIENTED[orientation]), exif=exif)
    assert seen(web, image(stored), text()) == seen(web, image(photo()), text())
    [report], _ = what_was_seen(web, image(stored), text())
    assert (report["orientation"], report["source_size"]) == (orientation, {"width": 96, "height": 64})


def test_colours_under_transparency_are_not_seen(web):
    hidden = np.random.default_rng(0).integers(0, 256, (64, 64, 4), np.uint8)
    hidden[:, :, 3] = 0
    white = Image.new("RGB", (64, 64), "white")
    assert seen(web, image(Image.fromarray(hidden)), text()) == seen(web, image(white), text())


GREEN = {"rgba_background_color": [0, 128, 0]}


@pytest.mark.parametrize("where", ["object", "beside", "request"])
def test_the_background_may_be_chosen(web, where):
    hidden = Image.new("RGBA", (64, 64), (9, 9, 9, 0))
    wanted = {
        "object": lambda: seen(web, image(hidden, **GREEN), text()),
        "beside": lambda: seen(web, image(hidden) | GREEN, text()),
        "request": lambda: seen(web, image(hidden), text(), media_io_kwargs={"image": GREEN}),
    }[where]()
    assert wanted == seen(web, image(Image.new("RGB", (64, 64), (0, 128, 0))), text())
    assert wanted != seen(web, image(hidden), text())


@pytest.mark.parametrize(("kind", "options"), [("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {})])
def test_one_picture_in_any_format_is_one_picture(web, kind, options):
    stored = picture_file(photo(), kind, **options)
    assert seen(web, image(stored), text()) == seen(web, image(photo()), text())


@pytest.mark.parametrize(
    "size", [(1, 1), (1, 28), (27, 257), (257, 27), (28, 28), (2, 2), (19, 500), (500, 19), (2, 400)]
)
def test_odd_sizes_are_seen(web, size):
    assert image_tokens(post(web, image(photo(size=size)), text())) > 0


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("GIF", {}), ("TIFF", {"compression": "group4"})])
def test_a_huge_picture_is_refused_before_it_is_decoded(web, kind, options):
    stored, before = picture_file(Image.new("1", (12000, 12000)), kind, **options), memory()
    answer = post(web, image(stored), text())
    assert answer.status_code == 400
    assert "12000x12000" in error_of(answer)["message"]
    assert error_of(answer)["param"] == "messages[0].content[0].image_url"
    assert memory() - before < 150 << 20  # decoded it would take 432 MB


def test_bad_pictures_among_good_ones_cost_them_nothing(web):
    alone = seen(web, image(photo(7)), text())
    bad = picture_file(photo(8), "JPEG")[:200]
    with ThreadPoolExecutor(10) as threads:
        answers = [threads.submit(seen, web, image(photo(7)), text()) for _ in range(6)]
        refused = [threads.submit(post, web, image(photo(7)), image(bad), text()) for _ in range(4)]
    assert all(answer.result() == alone for answer in answers)
    assert {answer.result().status_code for answer in refused} == {400}
    assert error_of(refused[0].result())["param"] == "messages[0].content[1].image_url"
    assert seen(web, image(photo(7)), text()) == alone


# ---------------------------------------------------------------- URLs and data URLs


def url_part(url, kind="image_url"):
    return {"type": kind, kind: {"url": url}}


def test_urls_that_do_not_answer_are_told_apart(local, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        silent = f"http://127.0.0.1:{mute.getsockname()[1]}/a.png"
        with socket.create_server(("127.0.0.1", 0)) as closing:
            closed = f"http://127.0.0.1:{closing.getsockname()[1]}/a.png"
        plain = str(local.base_url).replace("http:", "https:")
        unknown = "http://no-such-host.invalid/a.png"
        missing = f"{local.base_url}/nothing.png"
        said = {}
        for url, status, code in (
            (closed, 400, "media_unreachable"),
            (unknown, 400, "media_unreachable"),
            (plain, 400, "media_unreachable"),
            (missing, 400, "media_unreachable"),
            (silent, 504, "media_timeout"),
        ):
            answer = post(local, text(), url_part(url))
            error = error_of(answer)
            assert (answer.status_code, error["code"]) == (status, code), error
            assert error["param"] == "messages[0].content[1].image_url"
            said[error["message"]] = url
    assert len(said) == 5
    assert post(local, image(photo()), text()).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost.", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "a@127.0.0.1"],
)
def test_private_addresses_are_refused_at_every_door(web, host):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        url = f"http://{host}:{listener.getsockname()[1]}/latest/meta-data"
        answers = [
            post(web, url_part(url)),
            post(web, url_part(url, "video_url")),
            post(web, {"type": "input_image", "image_url": url}),
            post(web, {"type": "video", "video": [url]}),
            web.post("/v1/captions", json={"image_url": url}),
            web.post("/v1/media", json={"video_url": url}),
            web.post("/v1/media?dry_run=1", json={"image_url": url}),
        ]
        with pytest.raises(TimeoutError):
            listener.accept()
    told = {(a.status_code, error_of(a)["code"]) for a in answers}
    assert told <= {
        (400, "media_url_forbidden"),
        (400, "media_unreachable"),
    }  # some are no name to a resolver


def test_raw_clips_come_as_base64_and_as_data_urls(web):
    raw = base64.b64encode(clip_file(4)).decode()
    shapes = [
        {"type": "input_video", "input_video": {"data": raw, "format": "mp4"}},
        {"type": "input_video", "input_video": {"data": f"data:video/mp4;base64,{raw}"}},
        {"type": "input_video", "video_url": f"data:;base64,{raw}"},
        {"type": "video_url", "video_url": f'data:VIDEO/MP4;codecs="a,b";BASE64,{raw}'},
    ]
    first, *others = [seen(web, shape, text()) for shape in shapes]
    assert all(other == first for other in others)


def test_frames_answer_alike_as_a_list_and_as_a_data_url(web):
    frames = [base64.b64encode(picture_file(photo(i), "JPEG")).decode() for i in range(4)]
    joined = {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + ",".join(frames)}}
    urls = [f"data:image/jpeg;base64,{frame}" for frame in frames]
    listed = {"type": "video", "video": urls}
    assert seen(web, joined, text()) == seen(web, listed, text())
    assert seen(web, listed, text()) != seen(web, {"type": "video", "video": urls[::-1]}, text())


def test_a_stored_picture_answers_as_the_picture_itself(web):
    media = web.post("/v1/media", files={"image": picture_file(photo(20))}).json()
    dry = web.post("/v1/media?dry_run=1", files={"image": picture_file(photo(20))}).json()
    assert seen(web, {"type": "media", "media_id": media["id"]}, text()) == seen(
        web, image(photo(20)), text()
    )
    [report], _ = what_was_seen(web, image(photo(20)), text())
    assert (media["tokens"], media["grid"], media["size"]) == (dry["tokens"], dry["grid"], dry["size"])
    assert (report["tokens"], report["grid"], report["size"]) == (dry["tokens"], dry["grid"], dry["size"])


# ---------------------------------------------------------------- what is remembered


def test_pictures_in_turn_answer_as_they_do_alone(web, tmp_path):
    pictures = [image(photo(seed)) for seed in (30, 31)]
    warm = [seen(web, pictures[i], text()) for i in (0, 1, 0, 1, 1)]
    fresh = loaded(tmp_path, encoder_tokens=64, step_tokens=48)
    with serving(fresh, fresh.config) as url, httpx.Client(base_url=url, timeout=60) as alone:
        cold = [seen(alone, picture, text()) for picture in pictures]
    fresh.close()
    assert warm == [cold[i] for i in (0, 1, 0, 1, 1)]
    assert cold[0] != cold[1]


def test_what_is_known_is_told_as_cached(web):
    reports = [what_was_seen(web, image(photo(40)), text())[0][0] for _ in range(2)]
    assert [report.pop("cached") for report in reports] == [False, True]
    assert reports[0] == reports[1]


def test_a_uuid_never_gives_a_stale_answer(web):
    def under(part):
        return {**part, "uuid": "invoice"}

    first, second = image(photo(50)), image(photo(51, (160, 128)))
    assert seen(web, under(first), text()) == seen(web, first, text())
    assert seen(web, under(second), text()) == seen(web, second, text())
    for null in ({"type": "image_url", "image_url": None}, {"type": "input_image", "image_url": None}):
        assert seen(web, under(null), text()) == seen(web, second, text())


def test_others_finish_when_some_leave(web):
    alone = seen(web, image(photo(60, (256, 256))), text())
    body = {
        "messages": [{"role": "user", "content": [image(photo(60, (256, 256))), text()]}],
        "max_tokens": 500,
    }

    def leave():
        with web.stream("POST", "/v1/chat/completions", json={**body, "stream": True, "ignore_eos": True}):
            pass  # left before anything is read

    with ThreadPoolExecutor(8) as threads:
        leaving = [threads.submit(leave) for _ in range(4)]
        staying = [threads.submit(seen, web, image(photo(60, (256, 256))), text()) for _ in range(4)]
    assert [answer.result() for answer in staying] == [alone] * 4
    assert all(left.exception() is None for left in leaving)


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


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_as_clips_have_their_times(web, kind):
    frames = [photo(i) for i in range(3)]
    options = {"save_all": True, "append_images": frames[1:], "duration": 500}
    data = picture_file(frames[0], kind, **options)
    [report], _ = what_was_seen(web, part("video_url", data), text())
    assert report["timestamps"] == [0.0, 0.5, 1.0]
    [report], _ = what_was_seen(web, image(data), text())
    assert (report["kind"], report["format"]) == ("image", kind)


@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"num_frames": 4}, [0.0, 0.7, 1.3, 2.0]),
        ({"num_frames": 2}, [0.0, 2.0]),
        ({"fps": 2}, [0.0, 0.7, 1.3, 2.0]),
    ],
)
def test_a_rate_or_a_number_of_frames_is_enough(web, options, times):
    for where in ("object", "beside", "request"):
        clip = part("video_url", clip_file(21), **(options if where == "object" else {}))
        clip |= options if where == "beside" else {}
        request = {"mm_processor_kwargs": options} if where == "request" else {}
        [report], _ = what_was_seen(web, clip, text(), **request)
        assert report["timestamps"] == times


@pytest.mark.parametrize("kind", ["mp4", "mpegts", "matroska"])
@pytest.mark.parametrize("damage", ["tail", "middle"])
def test_damaged_clips_give_what_is_readable(web, kind, damage):
    fragments = {"movflags": "frag_keyframe+empty_moov", "g": "4"} if kind == "mp4" else {}
    stored = bytearray(clip_file(24, kind=kind, size=(128, 192), options=fragments))
    if damage == "tail":
        del stored[len(stored) * 2 // 3 :]
    else:
        stored[len(stored) // 2 : len(stored) // 2 + 200] = bytes(200)
    answer = post(web, part("video_url", bytes(stored), num_frames=12), text(), include=["media"])
    if answer.status_code == 400:
        assert error_of(answer)["param"] == "messages[0].content[0].video_url"
    else:
        [report] = answer.json()["media"]
        assert 0 < len(report["timestamps"]) <= 12
        assert report["timestamps"] == sorted(set(report["timestamps"]))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_clip_that_was_cut_off_is_answered_with_a_warning(web, stream):
    stored = clip_file(30, options={"movflags": "faststart"})[:-300]
    answer = post(web, part("video_url", stored, fps=10), text(), stream=stream)
    assert answer.status_code == 200
    assert "messages[0].content[0].video_url" in answer.text
    assert "cut off" in answer.text


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_a_system_turn_may_stand_before_a_picture(web, content):
    messages = [{"role": "system", "content": content}, {"role": "user", "content": [image(photo()), text()]}]
    assert image_tokens(post(web, messages=messages)) == image_tokens(post(web, image(photo())))


def test_a_picture_in_the_system_turn_is_seen_or_refused_by_name(web):
    messages = [{"role": "system", "content": [image(photo())]}, {"role": "user", "content": "What is it?"}]
    answer = post(web, messages=messages)
    if answer.status_code == 200:
        assert image_tokens(answer) > 0
    else:
        assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A server whose prompts and answers have 512 tokens at most."""
    service = loaded(tmp_path_factory.mktemp("short"), max_model_len=512)
    with serving(service, service.config) as url, httpx.Client(base_url=url, timeout=60) as web:
        yield web
    service.close()


LIMIT = {"max_pixels": 65536}
PLACES = {
    "object": lambda part: ([{**part, "image_url": {**part["image_url"], **LIMIT}}], {}),
    "beside": lambda part: ([part | LIMIT], {}),
    "flat": lambda part: ([part], {"mm_processor_kwargs": LIMIT}),
    "nested": lambda part: ([part], {"mm_processor_kwargs": {"images_kwargs": LIMIT}}),
    "short": lambda part: ([part], {"mm_processor_kwargs": {"image": LIMIT}}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_limit_is_honoured_wherever_it_stands(short, place):
    content, fields = PLACES[place](image(photo(size=(1400, 1400))))
    reports, _ = what_was_seen(short, *content * 3, text(), **fields)
    assert all(r["size"]["width"] * r["size"]["height"] <= LIMIT["max_pixels"] for r in reports)


@pytest.mark.parametrize(
    ("part", "fields", "where"),
    [
        ({"resized_width": 64}, {}, "messages[0].content[0].resized_width"),
        ({}, {"mm_processor_kwargs": {"max_pixel": 64}}, "mm_processor_kwargs.max_pixel"),
        ({}, {"media_io_kwargs": {"max_pixels": 64}}, "media_io_kwargs.max_pixels"),
    ],
)
def test_a_limit_that_is_none_is_told_where_to_stand(short, part, fields, where):
    answer = post(short, image(photo()) | part, text(), **fields)
    assert (answer.status_code, error_of(answer)["param"]) == (400, where)


def test_too_long_a_prompt_is_a_400_with_its_counts(short):
    answer = post(short, *[image(photo(size=(1400, 1400)))] * 3, text())
    error = error_of(answer)
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "512" in error["message"]
    assert image_tokens(post(short, image(photo()), text())) > 0


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
            service._engine.thread._engine.step = broken
            assert any("engine_dead" in line for line in lines)
        assert web.get("/health/ready").status_code == 503
        assert web.get("/health/live").status_code == 200
        late = post(web, text())
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
    service.close()
