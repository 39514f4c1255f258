"""A camera in a terminal: it is described whenever the scene has changed, and answers what is typed.

    python -m mmserve.demos.camera_client                          # camera 0 of this machine
    python -m mmserve.demos.camera_client --url rtsp://192.168.1.20/stream --server http://gpu:8000

A line is a question about what is seen now; ctrl-D leaves. A connection that is lost comes back by itself.
"""

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from mmserve.client import LiveClient, LiveError, Piece
from mmserve.client.video import Recorder, Source, device
from mmserve.errors import MMServeError

QUESTION = "Describe this image."
FPS, MAX_PIXELS = 5.0, 1 << 18


class Terminal:
    """Says one answer at a time, each with how old what it was about is, and how the connection does."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._connections = 0

    async def say(self, asked: str, pieces: AsyncIterator[Piece]) -> None:
        async with self.turn:  # a question is sent when it is its turn
            print(f"{asked} ", end="", flush=True)
            try:
                async for piece in pieces:
                    print(piece.text, end="", flush=True)
                    if piece.finish:
                        age = "nothing was seen" if piece.age_ms is None else f"{piece.age_ms:.0f} ms old"
                        print(f"  [{'cut, ' if piece.finish == 'cut' else ''}{age}]", flush=True)
            except LiveError as error:
                print(f"({error.message})", flush=True)

    def heed(self, event: dict[str, Any]) -> None:
        """Every event of the server's comes by here."""
        if event["type"] == "session.created":
            self._connections += 1
            self.note("connected" if self._connections == 1 else "connected again, with nothing seen yet")

    def note(self, text: str) -> None:
        print(f"— {text}", file=sys.stderr, flush=True)


async def watch(args: argparse.Namespace) -> int:
    terminal = Terminal()
    policy = {"fps": 2, "window_items": 1, "trigger": "change", "question": args.question}
    client = LiveClient(args.server, api_key=args.api_key, policy=policy, on_event=terminal.heed)
    source = source_of(args)
    async with client:
        parts = (changes(client, terminal), questions(client, terminal), recorded(source, client, terminal))
        work = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            await done.pop()  # its error, if that is why it ended
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            told = ", ".join(f"{count} {fate}" for fate, count in client.fates.most_common())
            terminal.note(f"{client.sent} frames sent: {told or 'none was seen'}")
    return 0


async def changes(client: LiveClient, terminal: Terminal) -> None:
    """What the server says by itself, whenever the scene has changed."""
    async for answer in client.answers():
        await terminal.say("·", aiter(answer))


async def questions(client: LiveClient, terminal: Terminal) -> None:
    """What is asked, line by line. With nobody there to ask it only watches."""
    lines = typed()
    async for question in lines:
        async with aclosing(client.ask(question)) as pieces:
            await terminal.say(">", pieces)
    if not sys.stdin.isatty():
        await asyncio.Event().wait()


async def typed() -> AsyncIterator[str]:
    """The lines of standard input, which are read on a thread of their own."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line.strip())
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    while (line := await lines.get()) is not None:
        if line:
            yield line


async def recorded(source: Source, client: LiveClient, terminal: Terminal) -> None:
    """Show the server a source until that ends; of its frames those that come too fast are never sent."""
    loop = asyncio.get_running_loop()

    def put(jpeg: bytes, captured: float) -> None:
        loop.call_soon_threadsafe(client.put, jpeg, captured)

    recorder = Recorder(source, put, FPS, MAX_PIXELS)
    try:
        await asyncio.to_thread(recorder.run, terminal.note)
        async with terminal.turn:
            pass  # who is speaking ends first
    finally:
        recorder.stop()


def source_of(args: argparse.Namespace) -> Source:
    if args.file:
        return Source(name=args.file, clip=True, loop=args.loop)
    return Source(name=args.url) if args.url else device(args.device)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Watch a camera from a terminal.")
    parser.add_argument("--device", default="0", help="a camera of this machine, by number or path (0)")
    parser.add_argument("--file", help="a clip instead, at its own pace")
    parser.add_argument("--loop", action="store_true", help="show it again and again")
    parser.add_argument("--url", help="a stream instead: rtsp, http(s)")
    parser.add_argument("--question", default=QUESTION, help=f"answered when the scene changes ({QUESTION})")
    parser.add_argument("--server", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("MMSERVE_API_KEY"))
    try:
        return asyncio.run(watch(parser.parse_args(argv)))
    except MMServeError as error:
        print(f"camera_client: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
