"""A server of one's own to try: ``mmserve serve`` on a free port, ended when its user is done."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmserve.core.errors import MMServeError

ENDING_S = 60
FAULTS = re.compile(r" (ERROR|CRITICAL) |^Traceback", re.MULTILINE)


@dataclass(frozen=True)
class OwnServer:
    base_url: str
    pid: int
    log: Path

    def faults(self) -> int:
        """How often its log tells of an error of its own."""
        return len(FAULTS.findall(self.log.read_text(errors="replace")))


@contextmanager
def own_server(options: Mapping[str, Any]) -> Iterator[OwnServer]:
    """A server with ``options`` of the configuration tree. MMServeError, with the end of its log, if it does
    not start. It has a session of its own, so that ctrl-C reaches its user first."""
    with tempfile.TemporaryDirectory(prefix="mmserve-soak-") as folder:
        log = Path(folder) / "server.log"
        with log.open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "mmserve.cli", "serve", *flags({**options, "port": 0})],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            found = re.search(r"ready at (http://\S+)", process.stdout.readline())
            if found is None:
                raise MMServeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")
            yield OwnServer(found[1], process.pid, log)
        finally:
            _end(process)


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as the command line of serve has them, on which the model is named without a flag."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if name == "model":
            words.append(str(value))
        elif isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=ENDING_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
