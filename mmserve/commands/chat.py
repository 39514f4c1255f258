"""``mmserve chat``: a small chat in the terminal about pictures and clips."""

import argparse
import asyncio
import re
import sys
import uuid
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmserve.commands import session
from mmserve.core.config import Config, MediaOptions, from_arguments
from mmserve.core.errors import MMServeError

if TYPE_CHECKING:
    from mmserve.core.messages import Message, Part
    from mmserve.service import Service

HELP = """\
Type a question; paths and URLs of pictures or clips in the line are shown to the model.
/image PATH  show a picture or clip with the next question    /reset  start anew    /quit  leave"""
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic")
CLIPS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".ts")
COMMAND = re.compile(r"/\w*(\s|$)")  # a path goes on with another / or a dot
WORD = re.compile(r"""'[^']*'|"[^"]*"|(?:\\.|\S)+""")


def add(commands: Any) -> None:
    parser = commands.add_parser("chat", help="chat about pictures and clips in the terminal")
    parser.add_argument("--temperature", type=float, metavar="VALUE", help="0 for the likeliest answer")
    parser.add_argument("--max-tokens", type=int, metavar="VALUE", help="longest answer in tokens")
    session.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = from_arguments(args)
    with session.loaded(config) as service, asyncio.Runner() as runner:
        return Chat(service, config, args).run(runner)


class Chat:
    """One conversation; ``pending`` media go out with the next question."""

    def __init__(self, service: "Service", config: Config, args: argparse.Namespace) -> None:
        from mmserve.advice import advised

        self.service, self.config = service, config
        wanted = {"temperature": args.temperature, "max_tokens": args.max_tokens}
        self.sampling = advised(service.spec.sampling, **wanted)
        self.messages: list[Message] = []
        self.pending: list[Part] = []

    def run(self, runner: asyncio.Runner) -> int:
        """Read lines until /quit or the end of input."""
        interactive = sys.stdin.isatty()
        if interactive:
            print(f"{self.service.model_name}\n{HELP}")
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                return 0
            if line in ("/quit", "/exit"):
                return 0
            self._handle(line, runner)

    def _handle(self, line: str, runner: asyncio.Runner) -> None:
        try:
            if line == "/reset":
                self.messages, self.pending = [], []
            elif line == "/help":
                print(HELP)
            elif line.split(maxsplit=1)[:1] == ["/image"]:
                self._show(line.removeprefix("/image").strip(), runner)
            elif COMMAND.match(line):
                print(f"there is no {line.split()[0]}; /help tells what there is", file=sys.stderr)
            elif line:
                runner.run(self._ask(line))
        except MMServeError as error:
            print(f"mmserve chat: {error.message}", file=sys.stderr)
        except KeyboardInterrupt:
            print()

    def _show(self, word: str, runner: asyncio.Runner) -> None:
        if not word:
            print("which picture? /image PATH", file=sys.stderr)
        else:
            self.pending.append(runner.run(session.media(unquoted(word), self.config.media)))

    async def _ask(self, line: str) -> None:
        """Stream the answer to ``line``; the turn is kept only when it was answered whole."""
        from mmserve.core.messages import ChatInput, Message, TextPart
        from mmserve.generation import generate

        question = Message("user", (*self.pending, *await parts(line, self.config.media)))
        chat = ChatInput(
            request_id=f"chat-{uuid.uuid4().hex}",
            messages=(*self.messages, question),
            sampling=self.sampling,
        )
        texts = []
        async with aclosing(generate(self.service, [chat])) as outputs:
            async for _, output in outputs:
                texts.append(output.text)
                print(output.text, end="", flush=True)
        print()
        self.messages += [question, Message("assistant", (TextPart("".join(texts)),))]
        self.pending = []


async def parts(line: str, limits: MediaOptions) -> list["Part"]:
    """The line's text and, in their places, the media whose paths or URLs it names."""
    from mmserve.caption import PROMPTS
    from mmserve.core.messages import TextPart

    found: list[Part] = []
    at = 0
    for word in WORD.finditer(line):
        if names_media(unquoted(word[0])):
            found += _text(line[at : word.start()])
            found.append(await session.media(unquoted(word[0]), limits))
            at = word.end()
    found += _text(line[at:])
    only_media = not any(isinstance(part, TextPart) for part in found)
    return [*found, TextPart(PROMPTS[type(found[-1])])] if only_media else found


def names_media(word: str) -> bool:
    """Whether a word of the line is a picture or clip rather than a word."""
    if not word.lower().split("?")[0].endswith(PICTURES + CLIPS):
        return False
    return session.is_url(word) or Path(word).expanduser().is_file()


def unquoted(word: str) -> str:
    """A path as a terminal pastes it: in quotes, or with its spaces escaped."""
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    return re.sub(r"\\(.)", r"\1", word)


def _text(words: str) -> list["Part"]:
    from mmserve.core.messages import TextPart

    return [TextPart(words.strip())] if words.strip() else []
