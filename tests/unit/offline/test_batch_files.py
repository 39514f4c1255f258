"""The files of a batch: what is refused, and what is mended."""

import json

import pytest

from mmserve.batch_files import Answers, check_apart, check_lines, read_lines
from mmserve.core.errors import InvalidRequest

CHAT = "/v1/chat/completions"


def request(custom_id="a", **fields):
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": []}, **fields}


def answer(custom_id="a", status=200):
    return {"id": "x", "custom_id": custom_id, "response": {"status_code": status, "body": {}}, "error": None}


def written(path, *lines, end="\n"):
    path.write_text("\n".join(json.dumps(line) for line in lines) + end)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.jsonl"


def test_requests_are_read_in_order_and_empty_lines_are_none(path):
    path.write_text("\n" + json.dumps(request("a")) + "\n\n" + json.dumps(request("b", extra=1)))
    assert [line.custom_id for line in read_lines(path)] == ["a", "b"]
    assert check_lines(path, [CHAT]) == {"a", "b"}


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([request(), request()], "twice"),
        ([request(method="GET")], "GET"),
        ([request(url="/v1/embeddings")], "/v1/embeddings"),
        ([request(body=[])], "object"),
        ([request(), request("")], "line 2"),
        ([{"url": CHAT, "body": {}}], "custom_id"),
        (["word"], "line 1"),
    ],
)
def test_a_request_that_is_none_is_refused_before_anything_runs(path, lines, says):
    with pytest.raises(InvalidRequest, match=says):
        check_lines(written(path, *lines), [CHAT])


def test_a_file_that_is_not_there_is_told(path):
    with pytest.raises(InvalidRequest, match="cannot read"):
        check_lines(path, [CHAT])


def test_answers_are_appended_and_counted(path):
    answers = Answers(path)
    answers.add(answer("a"))
    answers.add(answer("b", 400))
    answers.close()
    again = Answers(path)
    again.add(answer("c"))
    again.close()
    assert (again.done, again.failed) == ({"a", "b", "c"}, 1)
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


@pytest.mark.parametrize("torn", ['{"id": "x", "cus', '{"id": "x"}', "\x00\x00", "{" * 200_000])
def test_a_torn_answer_is_taken_away(path, torn):
    written(path, answer("a"), answer("b"))
    with path.open("a") as file:
        file.write(torn)
    answers = Answers(path)
    answers.close()
    assert answers.done == {"a", "b"}
    assert path.read_text().endswith("\n")
    assert len(path.read_text().splitlines()) == 2


def test_a_whole_answer_without_its_line_break_is_kept(path):
    answers = Answers(written(path, answer("a"), answer("b"), end=""))
    answers.add(answer("c"))
    answers.close()
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "b", "c"]


def test_a_file_of_something_else_is_left_alone(path):
    path.write_text("a diary\nof mine\n")
    with pytest.raises(InvalidRequest, match="line 1"):
        Answers(path)
    assert path.read_text() == "a diary\nof mine\n"


def test_the_answers_go_to_another_file(path):
    written(path, request())
    with pytest.raises(InvalidRequest, match="holds the requests"):
        check_apart(path, path.parent / "." / path.name)
