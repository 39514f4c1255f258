"""``mmserve demo``: the sample pictures and the clip that ship with mmserve, captioned and checked.

``mmserve demo NAME`` is a demo of its own, an application over the public API.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mmserve.commands import session
from mmserve.core.config import from_arguments

if TYPE_CHECKING:
    from mmserve.service import Service

# By name, since nothing but users of the public API may import them.
DEMOS = ("mmserve.demos.placard.command",)
NEXT = """
Serve it, and ask it about a picture from another terminal:
  {mmserve} serve
  curl -F image=@{picture} http://127.0.0.1:8000/v1/captions
Or a real model: {mmserve} serve Qwen/Qwen3-VL-2B-Instruct
Or let a camera see, and a wall label write itself: {mmserve} demo placard"""


class Sample(NamedTuple):
    """A picture or clip that ships with mmserve, and its true caption."""

    path: Path
    caption: str
    facts: dict[str, Any]


class Caption(NamedTuple):
    text: str
    tokens: int
    first_s: float
    total_s: float


def add(commands: Any) -> None:
    parser = commands.add_parser("demo", help="caption the samples that ship with mmserve and check them")
    session.add_model_arguments(parser)
    parser.set_defaults(run=run)
    demos = parser.add_subparsers(dest="demo", metavar="NAME", title="other demos")
    for name in DEMOS:
        import_module(name).add(demos)


def run(args: argparse.Namespace) -> int:
    config = from_arguments(args)
    start = time.monotonic()
    with session.loaded(config) as service:
        print(f"{service.model_name} loaded in {time.monotonic() - start:.1f} s\n", flush=True)
        found = samples()
        wrong = asyncio.run(show(service, found))
    print(f"\n{len(found) - wrong} of {len(found)} captions are right.")
    print(NEXT.format(mmserve=_own_name(), picture=_near(found[0].path)))
    return int(wrong > 0)


def samples() -> list[Sample]:
    from mmserve.models import tiny

    folder = Path(tiny.__file__).parent / "samples"
    rows = json.loads((folder / "samples.json").read_text(encoding="utf-8"))
    return [Sample(folder / row["file"], row["caption"], _facts(row)) for row in rows]


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """A photograph is from outside the model's world: right is to say so, with any of its fair colours."""
    return {"unknown": True, "colours": row["colours"]} if "colours" in row else {}


async def show(service: "Service", found: list[Sample]) -> int:
    """Caption one sample after the other; the number of wrong captions."""
    from mmserve.models.tiny.evaluate import judge
    from mmserve.models.tiny.example import Turn

    wrong = 0
    for sample in found:
        caption = await captioned(service, sample.path)
        right = judge(Turn("caption", "", sample.caption, sample.facts), caption.text)
        print(f"{'✓' if right else '✗'} {sample.path.name:<20} {caption.text}")
        if not right:
            print(f"  {'expected':<20} {sample.caption}")
        print(f"  {'':<20} {_times(caption)}", flush=True)
        wrong += not right
    return wrong


async def captioned(service: "Service", path: Path) -> Caption:
    from mmserve.caption import caption_chat
    from mmserve.generation import generate
    from mmserve.media import media_part

    start, moments, texts, tokens = time.monotonic(), [], [], 0
    chat = caption_chat(f"demo-{path.name}", media_part(path.read_bytes(), path.name))
    async with aclosing(generate(service, [chat])) as outputs:
        async for _, output in outputs:
            moments.append(time.monotonic() - start)
            texts.append(output.text)
            tokens = output.usage.completion_tokens
    return Caption("".join(texts).strip(), tokens, moments[0], moments[-1])


def _times(caption: Caption) -> str:
    first, total = 1000 * caption.first_s, 1000 * caption.total_s
    return f"first token {first:.0f} ms, {caption.tokens} tokens in {total:.0f} ms"


def _own_name() -> str:
    """How this command is called from here: it may stand in a virtual environment that is not active."""
    called = Path(sys.argv[0])
    if called.name != "mmserve" or shutil.which("mmserve"):
        return "mmserve"
    return _near(called.absolute())


def _near(path: Path) -> str:
    """The path as seen from here, if that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
