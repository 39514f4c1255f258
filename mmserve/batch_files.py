"""The files of a batch, in OpenAI's format: requests in, answers out as they finish, one a line."""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from mmserve.core.errors import InvalidRequest

GOOD = 200


class Line(Struct, frozen=True):
    """One request. ``body`` is what would be sent to ``url``, undecoded."""

    custom_id: Annotated[str, Meta(min_length=1)]
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Answered(Struct, frozen=True):
    """What resuming reads of an answer."""

    custom_id: str
    response: dict[str, Any] | None = None

    @property
    def good(self) -> bool:
        return self.response is not None and self.response.get("status_code") == GOOD


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a file, one by one; InvalidRequest names the line that is none."""
    decoder = msgspec.json.Decoder(Line)
    with _opened(path) as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    yield decoder.decode(text)
                except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                    raise InvalidRequest(f"{path}, line {number}: {error}", param=f"line {number}") from None


def check_lines(path: Path, urls: Collection[str]) -> set[str]:
    """All custom_ids. InvalidRequest for a request that could not be answered or told from another."""
    seen: set[str] = set()
    for line in read_lines(path):
        wrong = _wrong(line, urls, seen)
        if wrong:
            raise InvalidRequest(f"{path}, custom_id {line.custom_id[:100]!r}: {wrong}", param="custom_id")
        seen.add(line.custom_id)
    return seen


def _wrong(line: Line, urls: Collection[str], seen: set[str]) -> str | None:
    if line.custom_id in seen:
        return "it stands twice; every request needs its own"
    if line.method != "POST" or line.url not in urls:
        return f"{line.method[:20]} {line.url[:100]} cannot be asked; possible are POST {' and '.join(urls)}"
    if not bytes(line.body).startswith(b"{"):
        return "its body must be an object"
    return None


class Answers:
    """The file of answers. What an earlier run has finished is kept: ``done`` are its custom_ids.

    Every answer is written whole and at once. A run that was killed may leave a part of one at the end,
    which is taken away. InvalidRequest if the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: set[str] = set()
        self.failed = 0  # of all in the file
        if path.exists():
            _mend(path)
            for number, answered in enumerate(_answered(path), 1):
                if answered.custom_id in self.done:
                    raise InvalidRequest(
                        f"{path}, line {number}: {answered.custom_id!r} was answered already"
                    )
                self._count(answered)
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None

    def add(self, answer: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        self._count(msgspec.convert(answer, Answered))

    def close(self) -> None:
        self._file.close()

    def _count(self, answered: Answered) -> None:
        self.done.add(answered.custom_id)
        self.failed += not answered.good


def _answered(path: Path) -> Iterator[Answered]:
    decoder = msgspec.json.Decoder(Answered)
    with _opened(path) as file:
        for number, text in enumerate(file, 1):
            try:
                yield decoder.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise InvalidRequest(
                    f"{path}, line {number} is no answer of a batch; give another file for the answers"
                ) from None


def _mend(path: Path) -> None:
    """End the file with a whole line."""
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(file, size)
        file.seek(start)
        last = file.read()
        if not last:
            return
        try:
            msgspec.json.decode(last, type=Answered)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            file.truncate(start)
        else:
            file.write(b"\n")


def _start_of_last_line(file: Any, size: int, block: int = 1 << 16) -> int:
    """Where the text after the last line break begins."""
    end = size
    while end > 0:
        begin = max(end - block, 0)
        file.seek(begin)
        at = file.read(end - begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return 0


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from None


def check_apart(source: Path, target: Path) -> None:
    """InvalidRequest if the answers would go where the requests are."""
    if target.exists() and source.exists() and target.samefile(source):
        raise InvalidRequest(f"{target} holds the requests; give another file for the answers")
