"""The requests of a soak, by kind. Each knows what it must get; anything else is a ``Fault``."""

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from mmserve.bench.client import StreamError, events
from mmserve.bench.soak_media import broken, known, new_picture
from mmserve.bench.workload import WORDS

QUESTIONS = ("Describe this image.", "What colour is the ground?", "What is this?")
ANSWER = 48  # tokens of a known answer at most
LABEL: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "count": {"type": "integer", "maximum": 99}},
    "required": ["title", "count"],
    "additionalProperties": False,
}
CHOICES = ["A cat.", "A dog.", "I cannot tell."]
TOO_LONG = 40_000  # words


class Fault(Exception):
    """The server did what it must not do."""


class Different(Fault):
    """A known answer was another one than before."""


class Refused(Exception):
    """The server had no room, which is no fault where it was asked for."""


class Traffic:
    """Sends requests of every kind with ``client``; ``seed`` chooses them. Answers about known samples must
    be those of ``references``, which ``learn`` asks for while nothing else is sent."""

    def __init__(self, client: httpx.AsyncClient, model: str, seed: int) -> None:
        self.client, self.model = client, model
        self.choose = random.Random(seed)
        self.samples = known()
        self.references: dict[tuple[str, str], str] = {}
        self.kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "known": (6, self.known_sample),
            "new picture": (6, self.unseen_picture),
            "two pictures": (2, self.two_pictures),
            "text": (3, self.text),
            "schema": (2, self.schema),
            "choice": (1, self.one_of),
            "n answers": (2, self.several_answers),
            "upload": (2, self.upload),
            "response": (1, self.response),
            "completion": (1, self.completion),
            "slow reader": (1, self.slow_reader),
            "abort early": (3, self.abort_before_the_answer),
            "abort stream": (3, self.abort_in_mid_stream),
            "bad media": (2, self.bad_media),
            "bad request": (3, self.bad_request),
        }
        self._unsent = list(self.kinds)

    async def learn(self) -> None:
        """Ask for every known answer once, one after the other."""
        for sample in self.samples:
            for question in QUESTIONS:
                body = self._body([sample.part(self.choose), _text(question)], max_tokens=ANSWER)
                self.references[sample.name, question] = await self._answer(body)

    def next(self) -> tuple[str, Callable[[], Awaitable[None]]]:
        """The name of a kind, and what sends one request of it: first each once, then by their weights."""
        names = list(self.kinds)
        chosen = self.choose.choices(names, [self.kinds[n][0] for n in names])[0]
        name = self._unsent.pop() if self._unsent else chosen
        return name, self.kinds[name][1]

    # ------------------------------------------------------------ what must be answered

    async def known_sample(self) -> None:
        sample, question = self.choose.choice(self.samples), self.choose.choice(QUESTIONS)
        body = self._body([sample.part(self.choose), _text(question)], max_tokens=ANSWER)
        said = await (self._streamed(body) if self.choose.random() < 0.5 else self._answer(body))
        wanted = self.references[sample.name, question]
        if said != wanted:
            raise Different(f"{sample.name}, {question!r}: {said!r} instead of {wanted!r}")

    async def unseen_picture(self) -> None:
        parts = [await self._new_picture(), _text(self.choose.choice(QUESTIONS))]
        _spoken(await self._streamed(self._body(parts, max_tokens=self.choose.randrange(1, 64))))

    async def two_pictures(self) -> None:
        pictures = [
            await self._new_picture(),
            self.choose.choice(self.samples).part(self.choose),
        ]
        self.choose.shuffle(pictures)
        _spoken(await self._answer(self._body([*pictures, _text("What differs?")], max_tokens=24)))

    async def text(self) -> None:
        words = " ".join(self.choose.choices(WORDS, k=self.choose.randrange(1, 200)))
        fields = {"max_tokens": self.choose.randrange(1, 250), "temperature": 0.8, "ignore_eos": True}
        _spoken(await self._streamed(self._body([_text(words)], **fields)))

    async def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "label", "schema": LABEL}}
        parts = [self.choose.choice(self.samples).part(self.choose), _text("Write a label.")]
        said = await self._answer(self._body(parts, response_format=form, max_tokens=200))
        try:
            label = json.loads(said)
        except ValueError:
            raise Fault(f"no JSON: {said!r}") from None
        if label.keys() != set(LABEL["required"]) or not isinstance(label["count"], int):
            raise Fault(f"not of its schema: {said!r}")

    async def one_of(self) -> None:
        parts = [await self._new_picture(), _text("What is this?")]
        said = await self._answer(self._body(parts, structured_outputs={"choice": CHOICES}))
        if said not in CHOICES:
            raise Fault(f"none of the choices: {said!r}")

    async def several_answers(self) -> None:
        parts = [await self._new_picture(), _text("What is this?")]
        body = self._body(parts, n=3, temperature=1.0, max_tokens=12)
        choices = (await self._post("/v1/chat/completions", json=body))["choices"]
        if sorted(c["index"] for c in choices) != [0, 1, 2]:
            raise Fault(f"{len(choices)} answers instead of 3")

    async def upload(self) -> None:
        sample = self.choose.choice([s for s in self.samples if s.kind == "image"])
        mime, data = self.choose.choice(sample.files)
        body = await self._post("/v1/captions", files={"image": (sample.name, data, mime)})
        _spoken(body.get("caption"))

    async def response(self) -> None:
        url = (await self._new_picture())["image_url"]["url"]
        parts = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "What is this?"}]
        body = {"model": self.model, "input": [{"role": "user", "content": parts}], "max_output_tokens": 16}
        answer = await self._post("/v1/responses", json={**body, "store": self.choose.random() < 0.5})
        if answer.get("status") not in ("completed", "incomplete"):
            raise Fault(f"a response that is {answer.get('status')}")

    async def completion(self) -> None:
        prompt = " ".join(self.choose.choices(WORDS, k=20))
        body = {"model": self.model, "prompt": [prompt, prompt + " and"], "max_tokens": 8}
        choices = (await self._post("/v1/completions", json=body))["choices"]
        if len(choices) != 2:
            raise Fault(f"{len(choices)} completions of 2 prompts")

    async def slow_reader(self) -> None:
        body = self._body([_text("Say something long.")], max_tokens=40, ignore_eos=True)
        _spoken(await self._streamed(body, pause_s=0.05))

    # ------------------------------------------------------------ who leaves

    async def abort_before_the_answer(self) -> None:
        parts = [await self._new_picture(), _text("What is this?")]
        asked = asyncio.create_task(self._answer(self._body(parts, max_tokens=64)))
        done, _ = await asyncio.wait([asked], timeout=self.choose.random() * 0.4)
        if not done:
            asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        if not asked.cancelled() and (error := asked.exception()) is not None:
            raise error

    async def abort_in_mid_stream(self) -> None:
        parts = [self.choose.choice(self.samples).part(self.choose), _text("Describe this image.")]
        body = self._body(parts, max_tokens=200, ignore_eos=True)
        await self._streamed(body, most=self.choose.randrange(1, 40))

    # ------------------------------------------------------------ what must be refused

    async def bad_media(self) -> None:
        body = self._body([broken(self.choose, self.samples), _text("What is this?")])
        await self._refused(400, "/v1/chat/completions", json=body)

    async def bad_request(self) -> None:
        status, path, request = self.choose.choice(self._bad_requests())
        await self._refused(status, path, **request)

    def _bad_requests(self) -> list[tuple[int, str, dict[str, Any]]]:
        """(status that it must get, path, request)."""
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
        chats: list[dict[str, Any]] = [
            {"response_format": schema},
            {"structured_outputs": {"regex": "(("}},
            {"temperature": 9},
            {"max_tokens": 10_000_000},
            {"messages": []},
            {"messages": [{"role": "user", "content": [{"type": "no such part"}]}]},
        ]
        long = " ".join(["word"] * TOO_LONG)
        bodies = [{**self._body([_text("Hello.")]), **fields} for fields in chats]
        bodies += [self._body([_text(long)])]
        refused: list[tuple[int, str, dict[str, Any]]]
        refused = [(400, "/v1/chat/completions", {"json": body}) for body in bodies]
        refused += [(400, "/v1/chat/completions", {"content": b'{"messages": [', "headers": _JSON})]
        refused += [(400, "/v1/captions", {"files": {"image": ("x", b"no picture")}})]
        return [*refused, (404, "/v1/nothing", {"json": {}})]

    async def _new_picture(self) -> dict[str, Any]:
        """A picture that nobody has sent; made on a thread, so that others are not late meanwhile."""
        choose = random.Random(self.choose.getrandbits(64))
        return await asyncio.to_thread(new_picture, choose, self.samples)

    # ------------------------------------------------------------ the wire

    def _body(self, parts: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """A greedy request about ``parts``, with a field that no server knows, which must change nothing."""
        messages = [{"role": "user", "content": parts}]
        return {"model": self.model, "messages": messages, "temperature": 0, "x_soak": 1, **fields}

    async def _answer(self, body: dict[str, Any]) -> str:
        answer = await self._post("/v1/chat/completions", json=body)
        return answer["choices"][0]["message"]["content"] or ""

    async def _post(self, path: str, **request: Any) -> dict[str, Any]:
        answer = await self.client.post(path, **request)
        _check(answer.status_code, 200, answer.text)
        body: dict[str, Any] = answer.json()
        return body

    async def _refused(self, status: int, path: str, **request: Any) -> None:
        answer = await self.client.post(path, **request)
        _check(answer.status_code, status, answer.text)
        if not answer.json().get("error", {}).get("message"):
            raise Fault(f"a refusal that says nothing: {answer.text[:200]}")

    async def _streamed(self, body: dict[str, Any], most: int | None = None, pause_s: float = 0.0) -> str:
        """The words of a stream; after ``most`` events it is left, before each it may be paused."""
        said = []
        body = {**body, "stream": True}
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                _check(answer.status_code, 200, (await answer.aread()).decode(errors="replace"))
            stream = events(answer)
            try:
                async for event in stream:
                    said += [choice["delta"].get("content") or "" for choice in event.get("choices") or ()]
                    if most is not None and len(said) >= most:
                        break
                    await asyncio.sleep(pause_s)
            except StreamError as error:
                raise Fault(f"a broken stream: {error}") from None
            finally:
                await stream.aclose()
        return "".join(said)


def _check(status: int, wanted: int, text: str) -> None:
    if status == wanted:
        return
    if status == 503 and '"overloaded"' in text:
        raise Refused(text)
    raise Fault(f"HTTP {status} instead of {wanted}: {text[:300]}")


def _spoken(said: str | None) -> None:
    if not isinstance(said, str):
        raise Fault(f"no text: {said!r}")


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


_JSON = {"content-type": "application/json"}
