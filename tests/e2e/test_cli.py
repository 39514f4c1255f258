"""The command line: a subprocess where start-up is the point, else a service without a model in process."""

import asyncio
import io
import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
from fake_service import ANSWER, FakeService
from PIL import Image

from mmserve import __version__, cli
from mmserve.commands import evaluate

SENTENCE = "".join(ANSWER)


@pytest.fixture
def service(monkeypatch):
    """The service that every command of this test loads."""
    service = FakeService()
    module = ModuleType("mmserve.service")
    module.Service = SimpleNamespace(load=lambda config: service)
    monkeypatch.setitem(sys.modules, "mmserve.service", module)
    return service


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "red one.png"
    Image.new("RGB", (32, 32), "red").save(path)
    return path


def typed(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))


# ---------------------------------------------------------------- start-up


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; from mmserve import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'fastapi', 'numpy', 'cv2'} & set(sys.modules), 'too much is imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("serve", "caption", "chat", "eval", "demo", "doctor"):
        assert f"  {command} " in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"mmserve {__version__}\n"


@pytest.mark.parametrize("command", ["serve", "caption", "chat", "eval", "demo", "doctor"])
def test_every_command_documents_its_options(command, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert "--threads" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["serve", "--port", "70000"], "port must be at most 65535"),
        (["serve", "--kv-cache-mib", "0"], "kv_cache_mib must be at least 1"),
    ],
)
def test_an_option_out_of_range_names_what_is_allowed(args, names, capsys):
    assert cli.main(args) == cli.MISUSED
    assert names in capsys.readouterr().err


def test_a_port_in_use_fails_before_the_model_is_loaded(service, capsys):
    from mmserve.launch import bound

    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        assert cli.main(["serve", "--port", str(taken.getsockname()[1])]) == cli.MISUSED
    assert "cannot listen" in capsys.readouterr().err


def test_doctor_tells_the_machine_and_every_setting(capsys):
    assert cli.main(["doctor", "--json", "--port", "9", "--api-key", "secret"]) == 0
    out = capsys.readouterr().out
    report = json.loads(out)
    assert report["cpu"]["cores"] >= 1
    assert report["config"]["server"]["port"] == 9
    assert report["backends"]["device"]["runs"] in ("cpu", "cuda")
    assert all(choice["why"] for choice in report["backends"].values())
    assert report["packages"]["torch"]
    assert "secret" not in out
    assert report["processes"]["engine"] == "the model"
    assert cli.main(["doctor", "--no-engine-process"]) == 0
    assert "engine: in the api" in capsys.readouterr().out
    assert cli.main(["doctor"]) == 0
    assert "port: 8000" in capsys.readouterr().out


def test_doctor_loads_the_model_when_asked(service, capsys):
    assert cli.main(["doctor", "--load", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["model"] == "mmserve/tiny-vl"


# ---------------------------------------------------------------- caption


def test_one_picture_is_captioned(service, picture, capsys):
    assert cli.main(["caption", str(picture)]) == 0
    assert capsys.readouterr().out == SENTENCE + "\n"
    assert service.seen[0].sampling.temperature == 0


def test_a_picture_on_standard_input(service, picture, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(picture.read_bytes())))
    assert cli.main(["caption", "-", "--prompt", "What?", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out.strip() == "A red"
    assert service.seen[0].messages[0].content[1].text == "What?"


def test_many_files_in_order_and_a_bad_one_stops_nothing(service, picture, tmp_path, capsys):
    bad, missing = tmp_path / "bad.png", tmp_path / "missing.png"
    bad.write_bytes(b"no picture")
    sources = [str(p) for p in (picture, bad, missing, picture)]
    assert cli.main(["caption", *sources]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{picture}: {SENTENCE}"] * 2
    assert f"{bad}: not a picture" in err
    assert f"{missing}" in err
    assert len({chat.request_id for chat in service.seen}) == 3


def test_captions_as_json_lines(service, picture, tmp_path, capsys):
    assert cli.main(["caption", str(picture), str(tmp_path), "--json"]) == 1
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    assert (good["source"], good["caption"]) == (str(picture), SENTENCE)
    assert good["usage"]["completion_tokens"] == len(ANSWER)
    assert good["timings"]["total_s"] > 0
    assert bad["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("source", ["missing.png", "data:image/png;base64,!!"])
def test_one_bad_source_is_reported(service, source, capsys):
    assert cli.main(["caption", source]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("mmserve caption: ")


# ---------------------------------------------------------------- chat


def test_a_chat_remembers_its_turns_until_reset(service, monkeypatch, capsys):
    typed(monkeypatch, "hello", "and then?", "/reset", "again", "/quit", "never")
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().out == (SENTENCE + "\n") * 3
    assert [len(chat.messages) for chat in service.seen] == [1, 3, 1]
    assert service.seen[1].messages[1].content[0].text == SENTENCE
    assert service.seen[0].sampling.temperature == 0.7


def test_paths_in_the_line_become_pictures_in_their_places(service, picture, monkeypatch):
    typed(monkeypatch, f"What's in '{picture}' that is red?", str(picture).replace(" ", "\\ "))
    cli.main(["chat", "--temperature", "0"])
    first = service.seen[0].messages[0].content
    assert [type(part).__name__ for part in first] == ["TextPart", "ImagePart", "TextPart"]
    assert (first[0].text, first[2].text) == ("What's in", "that is red?")
    alone = service.seen[1].messages[-1].content
    assert alone[1].text == "Describe this image."


def test_a_picture_shown_beforehand_goes_with_the_next_question(service, picture, monkeypatch):
    typed(monkeypatch, f"/image {picture}", "What is it?", "And now?")
    cli.main(["chat"])
    kinds = [[type(part).__name__ for part in chat.messages[-1].content] for chat in service.seen]
    assert kinds == [["ImagePart", "TextPart"], ["TextPart"]]


def test_a_command_that_does_not_exist_is_no_question(service, picture, monkeypatch, capsys):
    typed(monkeypatch, "/hlep", "/imagine a cat", "/", str(picture).replace(" ", "\\ "), "/exit", "never")
    assert cli.main(["chat"]) == 0
    assert capsys.readouterr().err.count("/help") == 3
    assert len(service.seen) == 1


def test_a_failed_turn_is_told_and_forgotten(service, monkeypatch, capsys):
    typed(monkeypatch, "/image nowhere.png", "fail", "hello")
    assert cli.main(["chat"]) == 0
    out, err = capsys.readouterr()
    assert "nowhere.png" in err
    assert "lost" in err
    assert out.endswith(SENTENCE + "\n")
    assert len(service.seen[-1].messages) == 1


# ---------------------------------------------------------------- eval


def results():
    made = [("caption", "clean", True), ("caption", "clean", False), ("count", "clean", True)]
    return [evaluate.Result(*row, "q", "w", "s") for row in [*made, ("caption", "bad", True)]]


def test_the_evaluation_table_has_tasks_and_conditions():
    table = evaluate.markdown(results()).splitlines()
    assert table[0] == "| task | clean | bad |"
    assert table[2] == "| caption | 50.0 % of 2 | 100.0 % of 1 |"
    assert table[3] == "| count | 100.0 % of 1 | – |"
    assert table[4] == "| all | 66.7 % of 3 | 100.0 % of 1 |"


def test_the_evaluation_report_counts():
    report = evaluate.report("m", results(), [], 1.0)
    assert report["tasks"]["all"]["clean"] == {"right": 2, "asked": 3}


def test_the_evaluation_asks_the_bundled_questions(service, capsys):
    assert cli.main(["eval", "--limit", "6", "--json", "--wrong"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(c["asked"] for c in report["tasks"]["all"].values()) == 6
    assert report["wrong"][0]["said"] == SENTENCE


# ---------------------------------------------------------------- demo


def test_the_demo_fails_when_captions_are_wrong(service, capsys):
    assert cli.main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "✗ rocket.mp4" in out
    assert "A rocket moves up on a black ground." in out
    assert "0 of 9 captions are right" in out
    assert "mmserve serve" in out


def test_the_demo_succeeds_when_all_are_right(service, capsys, monkeypatch):
    from mmserve.commands import demo

    truths = {sample.path.name: sample.caption for sample in demo.samples()}

    async def knows(service, path):
        await asyncio.sleep(0)
        return demo.Caption(truths[path.name], 9, 0.1, 0.2)

    monkeypatch.setattr(demo, "captioned", knows)
    assert cli.main(["demo"]) == 0
    assert "✓ cat.jpg" in capsys.readouterr().out
