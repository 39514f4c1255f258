"""``mmserve demo placard`` as a process: it says where the placard hangs, and no more than it should."""

import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from helpers.placard import FIELDS, jpeg

# The real command over a service without a model; browsers that it opens are written down.
SCRIPT = """
import os, sys, types, webbrowser
sys.path[:0] = {here!r}
from fake_service import FakeService
class Service(FakeService):
    @classmethod
    def load(cls, config):
        return cls()
    start = load
module = types.ModuleType("mmserve.service")
module.Service = Service
sys.modules["mmserve.service"] = module
webbrowser.open = webbrowser.open_new = lambda url: print("opened", url, flush=True)
from mmserve.cli import main
sys.exit(main(["demo", "placard", "--port", "0", "--folder", {folder!r}, *sys.argv[1:]]))
"""


@pytest.fixture
def start(tmp_path):
    """Starts the command with the flags given; its process and the placard's URL."""
    running = []

    def begin(*flags, display=False):
        here = [str(folder) for folder in Path(__file__).parents[:2]]
        code = SCRIPT.format(here=here, folder=str(tmp_path / "labels"))
        env = {"PATH": "/usr/bin:/bin", **({"DISPLAY": ":7"} if display else {})}
        process = subprocess.Popen(
            [sys.executable, "-c", code, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        running.append(process)
        for line in process.stdout:
            if found := re.search(r"the placard hangs at (\S+)", line):
                return process, found[1]
        pytest.fail(process.communicate()[1])

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def ended(process):
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    return out, err


def test_one_command_serves_api_and_placard_and_says_where_labels_go(start, tmp_path):
    process, url = start()
    assert url.endswith("/placard/")
    assert httpx.get(url).status_code == 200
    setup = httpx.get(url + "setup.json").json()
    assert (setup["model"], setup["alt_first"]) == ("mmserve/tiny-vl", True)
    assert httpx.get(url.replace("/placard/", "/v1/models")).status_code == 200
    assert str(tmp_path / "labels") in process.stdout.readline()
    ended(process)


def test_another_model_has_all_voices(start):
    _, url = start("some/model", "--voice", "poet", "--language", "fr")
    setup = httpx.get(url + "setup.json").json()
    assert (setup["voice"], setup["language"], setup["alt_first"]) == ("poet", "fr", False)


def test_the_browser_is_opened_where_it_would_be_seen(start):
    process, url = start("--kiosk", "--screen", display=True)
    lines = {process.stdout.readline().strip() for _ in range(4)}
    assert {f"opened {url}?kiosk", f"opened {url}?screen"} <= lines
    ended(process)


@pytest.mark.parametrize(("flags", "display"), [(("--no-browser",), True), ((), False)])
def test_no_browser_is_opened_where_it_is_not_wanted_or_not_seen(start, flags, display):
    process, _ = start(*flags, display=display)
    out, _ = ended(process)
    assert "opened http" not in out


def test_who_waits_for_a_browser_where_there_is_no_display_is_told_to_open_one(start):
    process, _ = start()
    lines = [process.stdout.readline().strip() for _ in range(3)]
    assert lines[-1].startswith("open that address in a browser")


def test_a_process_waits_for_the_first_camera_from_the_start(start):
    pytest.importorskip("aiortc")
    process, _ = start()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not any(b"live.sources.whip" in _command(pid) for pid in children.read_text().split()):
        assert process.poll() is None
    ended(process)


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_over_https_it_has_a_certificate_of_its_own(start, tmp_path):
    _, url = start("--https")
    assert url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=tmp_path / "labels" / "https" / "certificate.pem")
    assert httpx.get(url, verify=trusted).status_code == 200


def test_a_kiosk_that_keeps_nothing_logs_nothing_but_counts(start):
    process, url = start("--kiosk", "--saving", "off")
    httpx.get(url)
    httpx.post(url + "counts", json={"looked": 3, "written": 2})
    refused = httpx.post(url + "labels", files={"image": jpeg()}, data={"label": str(FIELDS)})
    assert refused.status_code == 403
    _, err = ended(process)
    assert "looked 3, written 2, saved 0, refused 0" in err
    assert "/placard" not in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--night", "late"], "night must be two times"),
        (["--folder", "/dev/null/labels"], "labels cannot be kept in /dev/null/labels"),
        (["--still-s", "0"], "still_s must be at least 0.1"),
    ],
)
def test_what_cannot_be_is_told_before_a_model_is_loaded(flags, words, capsys):
    from mmserve import cli

    assert cli.main(["demo", "placard", *flags]) == cli.MISUSED
    assert words in capsys.readouterr().err
