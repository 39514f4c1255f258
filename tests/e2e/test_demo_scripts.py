"""The scripts that show how the API is used: a folder that is captioned, and a camera in a terminal."""

import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import av
import httpx
import numpy as np
import pytest
from fake_service import ANSWER, FakeService
from live_server import serving
from PIL import Image

from mmserve import demos
from mmserve.core.config import Config
from mmserve.demos import caption_folder
from mmserve.models import tiny
from mmserve.service import Service

SENTENCE = "".join(ANSWER)
KEY = "k" * 20
SAMPLES = Path(tiny.__file__).parent / "samples"


@pytest.mark.parametrize("name", ["caption_folder.py", "camera_client.py"])
def test_a_model_of_how_to_use_the_api_is_short(name):
    assert len((Path(demos.__file__).parent / name).read_text().splitlines()) < 150


# ---------------------------------------------------------------- caption_folder


@pytest.fixture
def service():
    return FakeService()


@pytest.fixture
def url(service):
    with serving(service, Config.of(api_key=KEY, drain_s=1)) as url:
        yield url


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "photos"
    (folder / "trip, one").mkdir(parents=True)
    for name in ("b.png", "trip, one/c.JPG", "trip, one/d.webp"):
        kind = {"png": "PNG", "jpg": "JPEG", "webp": "WEBP"}[name.rpartition(".")[2].lower()]
        Image.new("RGB", (32, 32), "red").save(folder / name, kind)
    (folder / "a broken.png").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("no picture either")
    return folder


def captioned(folder, url, out, *flags):
    return caption_folder.main([str(folder), "--server", url, "--api-key", KEY, "--out", str(out), *flags])


def rows(out):
    text = out.read_text(encoding="utf-8")
    if out.suffix == ".csv":
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(io.StringIO(text))]
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("name", ["captions.jsonl", "captions.csv"])
def test_a_folder_is_captioned_and_a_broken_file_stops_nothing(folder, url, tmp_path, name, capsys):
    out = tmp_path / name
    assert captioned(folder, url, out) == 1
    found = {row["file"]: row for row in rows(out)}
    assert sorted(found) == ["a broken.png", "b.png", "trip, one/c.JPG", "trip, one/d.webp"]
    assert found["trip, one/c.JPG"]["caption"] == SENTENCE
    assert "not a picture" in found["a broken.png"]["error"]
    told = capsys.readouterr()
    assert "3 of 4 files have a caption" in told.out
    assert "4/4" in told.err  # the progress


@pytest.mark.parametrize("name", ["captions.jsonl", "captions.csv"])
def test_a_second_run_asks_for_what_is_missing_or_failed_alone(folder, url, service, tmp_path, name):
    out = tmp_path / name
    captioned(folder, url, out)
    Image.new("RGB", (32, 32), "blue").save(folder / "a broken.png")
    Image.new("RGB", (32, 32), "blue").save(folder / "new.png")
    service.seen.clear()
    assert captioned(folder, url, out) == 0
    assert len(service.seen) == 2
    last = {row["file"]: row for row in rows(out)}
    assert all("caption" in row for row in last.values())
    service.seen.clear()
    assert captioned(folder, url, out) == 0
    assert service.seen == []


@pytest.mark.parametrize("name", ["captions.jsonl", "captions.csv"])
def test_who_was_killed_in_the_middle_of_a_line_goes_on(folder, url, service, tmp_path, name):
    out = tmp_path / name
    captioned(folder, url, out)
    whole = out.read_bytes()
    out.write_bytes(whole[:-10])
    service.seen.clear()
    captioned(folder, url, out)
    assert len(service.seen) == 2  # what was cut, and the broken one
    assert sum("caption" in row for row in rows(out)) == 3


def test_a_prompt_of_ones_own_is_asked(folder, url, service, tmp_path):
    captioned(folder, url, tmp_path / "out.jsonl", "--prompt", "What is it?", "--at-once", "1")
    assert {chat.messages[-1].content[1].text for chat in service.seen} == {"What is it?"}


def test_a_server_that_is_not_there_ends_it_and_nothing_is_written(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(caption_folder, "PAUSE_S", 0.0)
    assert captioned(folder, "http://127.0.0.1:9", tmp_path / "out.jsonl") == 1
    told = capsys.readouterr().out
    assert "0 of 4 files" in told
    assert "start again to go on" in told
    assert rows(tmp_path / "out.jsonl") == []


def test_a_wrong_key_is_told_for_each_file(folder, url, tmp_path):
    out = tmp_path / "out.jsonl"
    assert caption_folder.main([str(folder), "--server", url, "--api-key", "x", "--out", str(out)]) == 1
    assert all("API key is not valid (401)" in row["error"] for row in rows(out))


# ---------------------------------------------------------------- camera_client


@pytest.fixture(scope="module")
def live_url():
    service = Service.load(Config.of(api_key=KEY, drain_s=1))
    with serving(service, service.config) as url:
        while httpx.get(f"{url}/health/ready").status_code != 200:
            time.sleep(0.05)
        yield url
    service.close()


@pytest.fixture
def film(tmp_path):
    """A clip of a cat and then of apples, four seconds each."""
    path = tmp_path / "film.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt = 256, 256, "yuv420p"
        for name in ("cat.jpg", "apples.jpg"):
            with Image.open(SAMPLES / name) as image:
                pixels = np.asarray(image.convert("RGB").resize((256, 256)))
            for _ in range(40):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def watched(url, film, typed="", key=KEY, *flags):
    args = ["--file", str(film), "--server", url, "--api-key", key, *flags]
    return subprocess.run(
        [sys.executable, "-m", "mmserve.demos.camera_client", *args],
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_each_scene_is_described_when_it_comes(live_url, film):
    done = watched(live_url, film)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("·")]
    assert any("cat" in line.lower() for line in said), done.stdout + done.stderr
    assert any("apple" in line.lower() for line in said)
    assert "connected" in done.stderr
    assert "frames sent: " in done.stderr


def test_a_line_that_is_typed_is_answered_about_what_is_seen(live_url, film):
    done = watched(live_url, film, "What is this?\n")
    assert done.returncode == 0, done.stderr
    [answer] = [line for line in done.stdout.splitlines() if line.startswith(">")]
    assert "a cat" in answer.lower() or "apple" in answer.lower()
    assert "ms old]" in answer


def test_a_server_that_refuses_and_a_clip_that_is_none_are_told(live_url, film, tmp_path):
    done = watched(live_url, film, key="wrong")
    assert done.returncode == 1
    assert "camera_client: " in done.stderr
    assert "Traceback" not in done.stderr
    (tmp_path / "no.mp4").write_bytes(b"no clip")
    done = watched(live_url, tmp_path / "no.mp4")
    assert done.returncode == 1
    assert "cannot be read" in done.stderr
    assert "Traceback" not in done.stderr
