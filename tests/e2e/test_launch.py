"""``mmserve serve`` as a process: it says where it is, and ends well."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

# The real command over a service without a model.
SCRIPT = """
import sys, types
sys.path[:0] = {here!r}
from fake_service import FakeService
class Service(FakeService):
    @classmethod
    def load(cls, config):
        return cls()
    start = load
    def close(self):
        print("closed", flush=True)
module = types.ModuleType("mmserve.service")
module.Service = Service
sys.modules["mmserve.service"] = module
from mmserve.cli import main
sys.exit(main(["serve", "--port", "0", *sys.argv[1:]]))
"""


@pytest.fixture
def start():
    """Starts a server with the flags given; its process and its URL."""
    running = []

    def begin(*flags):
        code = SCRIPT.format(here=[str(folder) for folder in Path(__file__).parents[:2]])
        process = subprocess.Popen(
            [sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        ready = re.search(r"ready at (http://\S+)", process.stdout.readline())
        if not ready:
            process.kill()
            pytest.fail(process.communicate()[1])
        return process, ready[1]

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def chat(url, **fields):
    body = {"messages": [{"role": "user", "content": "long"}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def test_it_says_where_it_is_and_how_to_ask(start):
    process, url = start()
    assert httpx.get(f"{url}/health/ready").status_code == 200
    assert f"curl -F image=@photo.jpg {url}/v1/captions" in process.stdout.readline()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_stopping_server_finishes_what_it_began(start, sign):
    process, url = start()
    answers = []
    asking = threading.Thread(target=lambda: answers.append(chat(url, max_tokens=400)))
    with httpx.stream(
        "POST",
        f"{url}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "long"}], "max_tokens": 400, "stream": True},
        timeout=30,
    ) as stream:
        asking.start()
        lines = stream.iter_lines()
        next(lines)
        while "mmserve_requests_running 2.0" not in httpx.get(f"{url}/metrics").text:
            pass
        process.send_signal(sign)
        rest = [line for line in lines if line]
    asking.join()
    assert rest[-1] == "data: [DONE]"
    assert json.loads(answers[0].text)["usage"]["completion_tokens"] == 400
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out.endswith("closed\n")


def test_a_stopping_server_closes_websockets_and_waits_for_none_that_is_idle(start):
    process, url = start("--drain-s", "600")
    with connect(f"{url.replace('http', 'ws', 1)}/v1/realtime") as client:
        assert json.loads(client.recv(timeout=10))["type"] == "session.created"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionClosed):
            client.recv(timeout=10)
        assert (client.close_code, client.close_reason) == (1001, "the server is stopping")
    _, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "Traceback" not in err


def test_a_stopping_server_waits_no_longer_than_its_deadline(start):
    process, url = start("--drain-s", "1")
    answers = []
    asking = [
        threading.Thread(target=lambda stream=stream: answers.append(chat(url, stream=stream)))
        for stream in (False, True)
    ]
    for thread in asking:
        thread.start()
    while "mmserve_requests_running 2.0" not in httpx.get(f"{url}/metrics").text:
        pass
    process.send_signal(signal.SIGTERM)
    for thread in asking:
        thread.join()
    streamed, whole = sorted(answers, key=lambda answer: answer.status_code)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "server_stopping")
    *_, error, done, _ = streamed.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "server_stopping"
    assert done == "data: [DONE]"
    out, err = process.communicate(timeout=10)
    assert process.returncode == 0
    assert out.endswith("closed\n")
    assert "Traceback" not in err
