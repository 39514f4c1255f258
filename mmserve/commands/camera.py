"""``mmserve camera``: shows a server a camera, a clip or a stream, and asks about it."""

import argparse
import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from mmserve.commands.bench_options import amount, count
from mmserve.core.errors import ConfigError, MMServeError

if TYPE_CHECKING:
    from mmserve.client import LiveClient, Piece
    from mmserve.client.video import Source

QUESTION = "Describe this video."
KEY = "MMSERVE_API_KEY"


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "camera", help="show a server a camera, a clip or a stream, and ask about it"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--device", metavar="N|NAME", help="a camera of this machine, by number or path (default: 0)"
    )
    what.add_argument("--file", metavar="CLIP", help="a clip, at its own pace")
    what.add_argument("--url", metavar="URL", help="a stream: rtsp, http(s), ...")
    parser.add_argument("--loop", action="store_true", help="show a clip again and again")
    parser.add_argument(
        "--server", default="http://127.0.0.1:8000", metavar="URL", help="(default: http://127.0.0.1:8000)"
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help=f"the server's; {KEY} of the environment if not given"
    )
    parser.add_argument(
        "--ask", metavar="TEXT", help="ask this, once; without it, questions are read line by line"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--every", type=amount, metavar="S", help="have it answered every S seconds")
    when.add_argument(
        "--on-change", action="store_true", help="have it answered whenever the scene has changed"
    )
    parser.add_argument("--instructions", metavar="TEXT", help="what the model should know beforehand")
    parser.add_argument("--max-tokens", type=count, metavar="N", help="longest answer in tokens")
    parser.add_argument("--fps", type=amount, default=5.0, metavar="F", help="frames sent a second (5)")
    parser.add_argument(
        "--watch-fps", type=amount, default=2.0, metavar="F", help="frames the model sees a second (2)"
    )
    parser.add_argument(
        "--window", type=amount, metavar="S", help="seconds that it remembers; else a number of frames"
    )
    parser.add_argument("--max-pixels", type=count, default=1 << 18, metavar="N", help="of a frame (262,144)")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each answer")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    source = source_of(args)
    return asyncio.run(Watch(args, source).run())


def source_of(args: argparse.Namespace) -> "Source":
    """What is to be shown; ConfigError for options that contradict each other."""
    from mmserve.client.video import Source, device

    if args.loop and args.file is None:
        raise ConfigError("loop is for a clip, which --file names", param="loop")
    if args.file is not None:
        return Source(name=args.file, clip=True, loop=args.loop)
    if args.url is not None:
        return Source(name=args.url)
    return device(args.device or "0")


class Watch:
    """One camera and whoever asks about it."""

    def __init__(self, args: argparse.Namespace, source: "Source") -> None:
        self._args, self._source = args, source

    async def run(self) -> int:
        from mmserve.client import LiveClient

        args = self._args
        client = LiveClient(
            args.server,
            api_key=args.api_key or os.environ.get(KEY),
            policy=self._policy(),
            instructions=args.instructions,
            max_tokens=args.max_tokens,
        )
        async with client, self._recording(client) as ended:
            asking = asyncio.create_task(self._answers(client))
            # A clip's end ends what is answered by itself; a question that was asked is answered first.
            done, _ = await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
            if asking not in done:
                ended.result()
                if self._triggered:
                    asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            if not asking.cancelled():
                asking.result()
        return 0

    @property
    def _triggered(self) -> bool:
        return self._args.every is not None or self._args.on_change

    def _policy(self) -> dict[str, Any]:
        args = self._args
        policy: dict[str, Any] = {"fps": args.watch_fps, "max_pixels": args.max_pixels}
        if args.window is not None:
            policy["window_s"] = args.window
        if self._triggered:
            policy["question"] = args.ask or QUESTION
            policy["trigger"] = "change" if args.on_change else "every"
        if args.every is not None:
            policy["every_s"] = args.every
        return policy

    @asynccontextmanager
    async def _recording(self, client: "LiveClient") -> AsyncIterator["asyncio.Future[None]"]:
        """While the camera is shown, on a thread of its own; the future is done when it has ended."""
        from mmserve.client.video import Recorder

        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        args = self._args

        def put(data: bytes, captured: float) -> None:
            loop.call_soon_threadsafe(client.put, data, captured)

        recorder = Recorder(self._source, put, args.fps, args.max_pixels)

        def work() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                try:
                    recorder.run(_tell)
                except MMServeError as error:
                    loop.call_soon_threadsafe(_set, ended, error)
                else:
                    loop.call_soon_threadsafe(_set, ended, None)

        threading.Thread(target=work, daemon=True).start()
        try:
            yield ended
        finally:
            recorder.stop()
            ended.cancel()

    # ------------------------------------------------------------ answers

    async def _answers(self, client: "LiveClient") -> None:
        if self._triggered:
            async for answer in client.answers():
                await self._print(client, self._args.ask or QUESTION, aiter(answer))
        elif self._args.ask is not None:
            await self._ask(client, self._args.ask)
        else:
            async for question in _lines():
                await self._ask(client, question)

    async def _ask(self, client: "LiveClient", question: str) -> None:
        pieces = client.ask(question)
        async with aclosing(pieces):
            await self._print(client, question, pieces)

    async def _print(self, client: "LiveClient", question: str, pieces: AsyncIterator["Piece"]) -> None:
        """One answer, word by word unless as JSON, with how old what it was about is."""
        texts, first, last = [], None, None
        async for last in pieces:
            first = first or last
            texts.append(last.text)
            if not self._args.json:
                print(last.text, end="", flush=True)
        if first is None or last is None:
            return
        if self._args.json:
            told: dict[str, Any] = {"question": question, "text": "".join(texts), "age_ms": first.age_ms}
            told |= {"frame_seq": first.frame_seq, "finish": last.finish, "frames": dict(client.fates)}
            print(json.dumps(told, ensure_ascii=False), flush=True)
        else:
            age = "no frame was seen" if first.age_ms is None else f"{first.age_ms:.0f} ms old"
            print(f"\n  ({age}{', cut' if last.finish == 'cut' else ''})", flush=True)


async def _lines() -> AsyncIterator[str]:
    """Questions from standard input, up to its end."""
    if sys.stdin.isatty():
        print("Type a question about what the camera sees; ctrl-D ends.", file=sys.stderr)
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody asks any more
            for line in chain(sys.stdin, ("",)):
                loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()  # one that nothing waits for at the end
    while line := await lines.get():
        if line.strip():
            yield line.strip()


def _set(future: "asyncio.Future[None]", error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _tell(why: str) -> None:
    print(f"mmserve camera: {why}", file=sys.stderr, flush=True)
