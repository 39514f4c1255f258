"""``mmserve caption``: what is in these pictures and clips."""

import argparse
import asyncio
import json
import sys
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from mmserve.commands import session
from mmserve.core.config import Config, from_arguments
from mmserve.core.errors import MMServeError

if TYPE_CHECKING:
    from mmserve.service import Service

AT_ONCE = 32  # files read and in the engine at a time; more would only wait in memory


def add(commands: Any) -> None:
    parser = commands.add_parser("caption", help="describe pictures and clips")
    parser.add_argument(
        "sources", nargs="+", metavar="PATH|URL|-", help="picture or clip; - reads one from standard input"
    )
    parser.add_argument("--prompt", help="ask this instead of for a description")
    parser.add_argument("--max-tokens", type=_positive, metavar="VALUE", help="longest answer in tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    session.add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = from_arguments(args)
    with session.loaded(config) as service:
        return asyncio.run(Captioner(service, config, args).run(args.sources))


class Captioner:
    """Captions sources, prints them in the order given, and counts those that failed."""

    def __init__(self, service: "Service", config: Config, args: argparse.Namespace) -> None:
        self.service, self.config = service, config
        self.prompt, self.max_tokens, self.as_json = args.prompt, args.max_tokens, args.json

    async def run(self, sources: Sequence[str]) -> int:
        if len(sources) == 1:
            return int(not await self._stream(sources[0]))
        return int(bool(await self._many(sources)))

    async def _stream(self, source: str) -> bool:
        """One caption, word by word unless as JSON; whether it succeeded."""
        if self.as_json:
            return self._print(source, await self._result(source))
        try:
            async with aclosing(self._outputs(source)) as outputs:
                async for output in outputs:
                    print(output.text, end="", flush=True)
            print()
        except MMServeError as error:
            return self._print(source, {"error": error.body()["error"]})
        return True

    async def _many(self, sources: Sequence[str]) -> int:
        """All captions, several at a time; the number that failed."""
        from tqdm import tqdm

        gate, failed = asyncio.Semaphore(AT_ONCE), 0
        with tqdm(total=len(sources), unit="file", file=sys.stderr, disable=None) as bar:

            async def one(source: str) -> dict[str, Any]:
                async with gate:
                    result = await self._result(source)
                bar.update()
                return result

            tasks = [asyncio.create_task(one(source)) for source in sources]
            for source, task in zip(sources, tasks, strict=True):
                result = await task
                with tqdm.external_write_mode(file=sys.stdout):
                    failed += not self._print(source, result, named=True)
        return failed

    async def _result(self, source: str) -> dict[str, Any]:
        import msgspec

        texts: list[str] = []
        last = None
        try:
            async with aclosing(self._outputs(source)) as outputs:
                async for last in outputs:
                    texts.append(last.text)
        except MMServeError as error:
            return {"error": error.body()["error"]}
        usage = msgspec.structs.asdict(last.usage) if last else {}
        return {"caption": "".join(texts).strip(), "usage": usage, "timings": _timings(last)}

    async def _outputs(self, source: str) -> AsyncGenerator[Any, None]:
        from mmserve.caption import MAX_TOKENS, caption_chat
        from mmserve.core.messages import SamplingParams
        from mmserve.generation import generate

        media = await session.media(source, self.config.media)
        sampling = SamplingParams(temperature=0.0, max_tokens=self.max_tokens or MAX_TOKENS)
        chat = caption_chat(f"caption-{uuid.uuid4().hex}", media, self.prompt, sampling)
        async with aclosing(generate(self.service, [chat])) as outputs:
            async for _, output in outputs:
                yield output

    def _print(self, source: str, result: dict[str, Any], named: bool = False) -> bool:
        """Print one result; whether it is a caption."""
        good = "error" not in result
        if self.as_json:
            print(json.dumps({"source": source, **result}, ensure_ascii=False), flush=True)
        elif good:
            print(f"{source}: {result['caption']}" if named else result["caption"], flush=True)
        else:
            print(f"mmserve caption: {source}: {result['error']['message']}", file=sys.stderr, flush=True)
        return good


def _timings(last: Any) -> dict[str, float]:
    if last is None or last.timings is None:
        return {}
    t = last.timings
    moments = {"ttft_s": t.first_token, "total_s": t.finished}
    return {name: round(at - t.arrived, 6) for name, at in moments.items() if at is not None}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)
