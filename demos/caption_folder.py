"""Captions the pictures and clips of a folder into a JSONL or CSV file, over the REST API.

    python -m mmserve.demos.caption_folder photos/ --out captions.jsonl
    python -m mmserve.demos.caption_folder photos/ --out captions.csv --server http://gpu:8000 --at-once 16

Every caption is written as it comes. Started again it goes on with what is missing or has failed, so it may
be stopped at any moment; of several lines about one file the last holds.
"""

import argparse
import asyncio
import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

KINDS = re.compile(r".+\.(jpe?g|png|webp|gif|tiff?|avif|heic|mp4|mov|mkv|webm|avi)", re.IGNORECASE)
COLUMNS = ("file", "caption", "error")
BUSY = (429, 502, 503, 504)  # these pass: the server is full, or starts again
TRIES, PAUSE_S, TIMEOUT_S = 6, 1.0, 300.0


class Results:
    """The file of captions, JSONL or CSV by its name; ``done`` are the files that have one."""

    def __init__(self, path: Path) -> None:
        self.csv = path.suffix.lower() == ".csv"
        self.done: set[str] = set()
        if path.exists():
            whole = path.read_bytes()
            whole = whole[: whole.rfind(b"\n") + 1]  # who was killed may have left a part of a line
            os.truncate(path, len(whole))
            for row in self._rows(whole.decode()):
                (self.done.discard if row.get("error") else self.done.add)(row["file"])
        self.out = path.open("a", encoding="utf-8", newline="")
        if self.csv and path.stat().st_size == 0:
            self._write(",".join(COLUMNS))

    def add(self, file: str, caption: str = "", error: str = "") -> None:
        self.done |= {file} if caption else set()
        row = {"file": file, "caption": " ".join(caption.split()), "error": " ".join(error.split())}
        if self.csv:
            line = io.StringIO()
            csv.DictWriter(line, COLUMNS).writerow(row)
            self._write(line.getvalue().rstrip("\r\n"))
        else:
            self._write(json.dumps({name: value for name, value in row.items() if value}, ensure_ascii=False))

    def _rows(self, text: str) -> Iterable[dict[str, Any]]:
        return csv.DictReader(io.StringIO(text)) if self.csv else map(json.loads, text.splitlines())

    def _write(self, line: str) -> None:
        self.out.write(line + "\n")
        self.out.flush()


class Captioner:
    """Sends files to the server, ``at_once`` at a time, and waits where that is busy."""

    def __init__(self, client: httpx.AsyncClient, root: Path, results: Results, prompt: str | None) -> None:
        self.client, self.root, self.results = client, root, results
        self.fields = {"prompt": prompt} if prompt else {}
        self.lost = False

    async def run(self, files: Sequence[str], at_once: int, bar: "tqdm[Any]") -> None:
        waiting = iter(files)

        async def worker() -> None:
            for file in waiting:
                await self._one(file)
                if self.lost:
                    return
                bar.update()

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(worker())

    async def _one(self, file: str) -> None:
        try:
            data = await asyncio.to_thread((self.root / file).read_bytes)
            self.results.add(file, caption=await self._caption(file, data))
        except ConnectionError:
            self.lost = True  # so are all others: they are for the next start
        except (OSError, httpx.HTTPError, ValueError, KeyError) as error:  # the last two: not our server
            self.results.add(file, error=str(error) or type(error).__name__)

    async def _caption(self, file: str, data: bytes) -> str:
        files = {"file": (Path(file).name, data)}
        for number in range(TRIES):
            with suppress(httpx.TransportError):
                answer = await self.client.post("/v1/captions", files=files, data=self.fields)
                if answer.status_code not in BUSY:
                    break
            await asyncio.sleep(PAUSE_S * 2**number)
        else:
            raise ConnectionError
        body = answer.json()
        if answer.is_error:
            raise httpx.HTTPError(f"{body['error']['message']} ({answer.status_code})")
        return str(body["caption"])


def found(root: Path) -> list[str]:
    """The pictures and clips below a folder, by their paths from there."""
    paths = (path for path in root.rglob("*") if KINDS.fullmatch(path.name) and path.is_file())
    return sorted(path.relative_to(root).as_posix() for path in paths)


async def run(args: argparse.Namespace) -> int:
    results, files = Results(args.out), found(args.folder)
    missing = [file for file in files if file not in results.done]
    headers = {"authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with results.out:
        async with httpx.AsyncClient(base_url=args.server, headers=headers, timeout=TIMEOUT_S) as client:
            captioner = Captioner(client, args.folder, results, args.prompt)
            with tqdm(total=len(files), initial=len(files) - len(missing), unit="file") as bar:
                await captioner.run(missing, args.at_once, bar)
    good = sum(file in results.done for file in files)
    lost = "; the server is gone or busy: start again to go on" if captioner.lost else ""
    print(f"{good} of {len(files)} files have a caption in {args.out}{lost}")
    return int(good < len(files))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Caption the pictures and clips of a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("captions.jsonl"), help=".jsonl (default) or .csv")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("MMSERVE_API_KEY"))
    parser.add_argument("--prompt", help="ask this instead of for a caption")
    parser.add_argument("--at-once", type=int, default=4, help="files on their way at a time (4)")
    try:
        return asyncio.run(run(parser.parse_args(argv)))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
