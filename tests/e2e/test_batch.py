"""A batch: the same answers as the server's, resumed where it stopped."""

import asyncio
import json
from contextlib import contextmanager

import httpx
import pytest
from fake_service import ANSWER
from live_server import serving
from PIL import Image
from word_service import WordService

from mmserve import cli
from mmserve.batch_files import Answers
from mmserve.commands import batch, session
from mmserve.core.config import Config
from mmserve.core.errors import EngineDead

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
OWN = ("id", "created", "timings")  # of one answer alone


def chat(text="hi", **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


def look(url):
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}]}


def write(path, bodies):
    lines = [
        {"custom_id": name, "method": "POST", "url": COMPLETION if "prompt" in body else CHAT, "body": body}
        for name, body in bodies.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def answers_in(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"] for line in lines}


@pytest.fixture
def service():
    return WordService()


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def mmserve(monkeypatch, service, files):
    """Runs the command over the fake service; its exit status."""

    @contextmanager
    def loaded(config):
        yield service

    monkeypatch.setattr(session, "loaded", loaded)
    return lambda *flags: cli.main(["batch", *map(str, files), *flags])


BODIES = {
    "chat": chat(),
    "two": chat(n=2, seed=1, max_tokens=2, logprobs=True),
    "raw": {"prompt": ["a", "b"], "echo": True},
    "bad": chat(temperature=9),
    "lost": chat("fail"),
    "other": chat(model="gpt-9"),
    "stream": chat(stream=True),
    "long": chat("x" * 6000),
}


def test_every_line_gets_what_the_server_would_say(mmserve, service, files):
    write(files[0], BODIES)
    assert mmserve("--concurrency", "3") == 1
    found = answers_in(files[1])
    assert found["stream"]["body"]["error"]["param"] == "stream"
    with serving(service, Config()) as url:
        for name, body in BODIES.items():
            if name != "stream":
                path = COMPLETION if "prompt" in body else CHAT
                answer = httpx.post(url + path, json=body, timeout=60)
                assert found[name]["status_code"] == answer.status_code
                assert _without_own(found[name]["body"]) == _without_own(answer.json())


def _without_own(body):
    return {key: value for key, value in body.items() if key not in OWN}


def test_status_is_zero_when_all_is_well(mmserve, files):
    write(files[0], {"a": chat(), "b": {"prompt": "x"}})
    assert mmserve() == 0
    [choice] = answers_in(files[1])["a"]["body"]["choices"]
    assert choice["message"]["content"] == "".join(ANSWER)


def test_what_is_finished_is_not_asked_again(mmserve, service, files):
    write(files[0], {"a": chat("one"), "b": chat("two")})
    assert mmserve() == 0
    write(files[0], {"a": chat("one"), "b": chat("two"), "c": chat("three")})
    with files[1].open("a") as file:
        file.write('{"custom_id": "c", "resp')
    assert mmserve() == 0
    assert set(answers_in(files[1])) == {"a", "b", "c"}
    assert [c.messages[0].content[0].text for c in service.asked].count("one") == 1
    assert mmserve() == 0
    assert len(service.asked) == 3


def test_requests_run_together_but_not_too_many(mmserve, service, files):
    write(files[0], {str(i): chat() for i in range(24)})
    assert mmserve("--concurrency", "4") == 0
    assert service.most_running == 4


@pytest.mark.parametrize("value", ["0", "100000"])
def test_more_at_once_than_may_wait_is_refused(mmserve, files, value):
    write(files[0], {"a": chat()})
    assert mmserve("--concurrency", value) == 2


def test_a_run_that_is_stopped_leaves_whole_lines_and_goes_on(mmserve, service, files):
    write(files[0], {"a": chat(), "b": chat("long"), "c": chat()})

    async def stopped():
        answers = Answers(files[1])
        run = asyncio.create_task(batch.answer_all(service, Config(), files[0], answers, 3, 3))
        while len(answers.done) < 2:
            await asyncio.sleep(0.01)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        answers.close()

    asyncio.run(stopped())
    assert service.running == 0
    assert set(answers_in(files[1])) == {"a", "c"}
    write(files[0], {"a": chat(), "b": chat(), "c": chat()})
    assert mmserve() == 0
    assert set(answers_in(files[1])) == {"a", "b", "c"}


def test_a_dead_engine_ends_the_run_and_answers_nothing_for_the_rest(mmserve, service, files):
    async def dead(chat):
        raise EngineDead("the engine ended")
        yield

    service.generate = dead
    write(files[0], {"a": chat(), "b": chat()})
    assert mmserve() == 1
    assert answers_in(files[1]) == {}


def test_a_fault_of_ours_is_a_500_of_that_line_alone(mmserve, files):
    write(files[0], {"a": chat("break"), "b": chat()})
    assert mmserve() == 1
    found = answers_in(files[1])
    assert (found["a"]["status_code"], found["b"]["status_code"]) == (500, 200)


def test_pictures_may_be_paths_under_the_media_root(mmserve, files, tmp_path):
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    Image.new("RGB", (40, 30), "red").save(root / "sub" / "a b.png")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "outside.png")
    good = ["sub/a b.png", "file://sub/a%20b.png", "file:sub/a%20b.png", str(root / "sub" / "a b.png")]
    bad = ["../outside.png", str(tmp_path / "outside.png"), "sub/none.png", "file://../outside.png", "nul\0"]
    write(files[0], {source: look(source) for source in good + bad})
    assert mmserve("--media-root", str(root)) == 1
    found = answers_in(files[1])
    assert {source: found[source]["status_code"] for source in good + bad} == {
        **dict.fromkeys(good, 200),
        **dict.fromkeys(bad, 400),
    }


def test_without_a_media_root_a_path_is_told_what_it_needs(mmserve, files):
    write(files[0], {"a": look("a.png")})
    assert mmserve() == 1
    assert "media_root" in answers_in(files[1])["a"]["body"]["error"]["message"]
