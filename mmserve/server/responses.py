"""POST /v1/responses, and GET and DELETE of what was stored there.

``store`` is on unless it is turned off: a later request can go on from a response by its id for as long as
it is kept (``response_store``). Tools are functions; thoughts, messages and calls are items of the output.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from msgspec import Meta, Struct, structs
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest, MMServeError, NotFound
from mmserve.core.messages import ChatInput, SamplingParams, TextOutput, Usage
from mmserve.generation import Generator
from mmserve.media import MediaDesk
from mmserve.parsing.toolbox import Toolbox, read_toolbox
from mmserve.server.conversation import conversation
from mmserve.server.deadline import deadline, fetched_by
from mmserve.server.errors import unsupported
from mmserve.server.forms import TextFormat, form_of, form_with_tools
from mmserve.server.models import check_model
from mmserve.server.parsed import parsed
from mmserve.server.protocol import Positive, TalkFields, convert, read_json
from mmserve.server.reply import answered, reply
from mmserve.server.response_items import Dialogue, listed, messages_of
from mmserve.server.response_output import Events, Output, untold
from mmserve.server.response_store import ResponseStore, StoredResponse
from mmserve.server.sampling import sampling_params

router = APIRouter()

# What this endpoint cannot honour, and the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_logprobs": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_METADATA = (16, 64, 512)  # pairs, and characters of a key and of a value


class ReasoningFields(Struct, frozen=True, kw_only=True):
    """``effort`` none turns thoughts off; how hard a model thinks otherwise is its own matter."""

    effort: Literal["none"] | None = None
    summary: None = None


class TextFields(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(TalkFields, kw_only=True):
    """Body of POST /v1/responses."""

    input: Any
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    n: Any = None
    prompt: Any = None
    prompt_logprobs: Any = None
    service_tier: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    def check(self) -> None:
        """InvalidRequest for what this endpoint cannot honour."""
        self.refuse()
        for name, idle in _UNSUPPORTED.items():
            value = getattr(self, name)
            if value is not None and value not in idle:
                raise unsupported(name, f"{name} is not supported here")
        if self.max_tokens is not None:
            raise unsupported("max_tokens", "the limit of an answer is called max_output_tokens here")
        check_metadata(self.metadata, "metadata")

    @property
    def format(self) -> TextFormat | None:
        return self.text.format if self.text else None

    def toolbox(self) -> Toolbox:
        """The tools, which are written flat here; InvalidRequest names the field that is wrong."""
        try:
            return read_toolbox(
                nested_tools(self.tools), nested_choice(self.tool_choice), self.parallel_tool_calls
            )
        except InvalidRequest as error:
            error.message = error.message.replace(".function", "")
            error.param = error.param and error.param.replace(".function", "")
            raise

    def template_kwargs(self, tools: Toolbox) -> dict[str, Any]:
        kwargs = super().template_kwargs(tools)
        if self.reasoning and self.reasoning.effort == "none":
            kwargs.setdefault("enable_thinking", False)
        return kwargs


def check_metadata(given: Mapping[str, str] | None, where: str) -> None:
    """InvalidRequest for more, or longer, than OpenAI has it."""
    pairs, longest_key, longest_value = _METADATA
    given = given or {}
    if len(given) > pairs or any(len(k) > longest_key or len(v) > longest_value for k, v in given.items()):
        raise InvalidRequest(
            f"{where} may have {pairs} pairs of {longest_key} and {longest_value} characters", param=where
        )


@router.post("/v1/responses")
async def create(request: Request) -> Response:
    wanted = await read_json(request, ResponseRequest)
    state = request.app.state
    check_model(state.service, wanted.model)
    wanted.check()
    owner, started = request.scope["owner"], request.scope["started"]
    job = ResponseJob(state.service, state.desk, state.responses, wanted, owner, started)
    return await answered(request, job, wanted.stream)


@router.get("/v1/responses/{response_id}")
async def get(request: Request, response_id: str) -> Response:
    stored = request.app.state.responses.get(request.scope["owner"], response_id)
    if stored is None:
        raise _not_stored(response_id)
    return reply(stored.body)


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    """The items of this response's own input, the last one first if not asked otherwise."""
    page = convert(dict(request.query_params), Page, strict=False)
    stored = request.app.state.responses.get(request.scope["owner"], response_id)
    if stored is None:
        raise _not_stored(response_id)
    return reply(page.of(listed(stored.input, response_id)))


@router.delete("/v1/responses/{response_id}")
async def delete(request: Request, response_id: str) -> Response:
    if not request.app.state.responses.delete(request.scope["owner"], response_id):
        raise _not_stored(response_id)
    return reply({"id": response_id, "object": "response", "deleted": True})


class ResponseJob:
    """One request, to be answered whole or as a stream."""

    def __init__(
        self,
        service: Generator,
        desk: MediaDesk,
        store: ResponseStore,
        wanted: ResponseRequest,
        owner: str,
        started: float,
    ) -> None:
        self.service, self.desk, self.store = service, desk, store
        self.wanted, self.owner, self.started = wanted, owner, started
        self.id = f"resp_{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.dialogue = Dialogue(self._earlier(), wanted.instructions, wanted.input)
        self.defaults = wanted.media_options()
        self.tools = wanted.toolbox()
        self.template_kwargs = wanted.template_kwargs(self.tools)
        self.sampling = self._sampling()

    def _sampling(self) -> SamplingParams:
        wanted, spec = self.wanted, self.service.spec
        form = form_of(wanted.format, wanted.structured_outputs)
        return sampling_params(
            wanted,
            spec.sampling,
            max_tokens=wanted.max_output_tokens,
            form=form_with_tools(form, self.tools, spec.chat_template),
            thinking_budget=wanted.budget(spec.chat_template),
        )

    async def complete(self) -> dict[str, Any]:
        output = Output(untold)
        with self.dialogue.naming():
            async with aclosing(parsed(self.service, await self._chat(), self.tools)) as pieces:
                async for piece in pieces:
                    for event in piece.events:
                        output.take(event)
        output.finish(_status(piece.output))
        return self._finished(output, piece.output)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's events. The first waits for the model's first word: until then an error is a plain
        answer; later it is ``response.failed``."""
        events = Events()
        output = Output(events.tell)
        try:
            with self.dialogue.naming():
                async with aclosing(parsed(self.service, await self._chat(), self.tools)) as pieces:
                    async for piece in pieces:
                        data = b"" if events.count else self._begun(events)
                        data += b"".join([output.take(event) for event in piece.events])
                        if piece.output.finish_reason:
                            data += output.finish(_status(piece.output))
                            body = self._finished(output, piece.output)
                            data += events.tell(f"response.{body['status']}", response=body)
                        if data:
                            yield data
        except MMServeError as error:
            if not events.count:
                raise
            fault = {"code": "server_error", "message": error.message}
            yield events.tell("response.failed", response=self._body("failed", [], error=fault))

    def _begun(self, events: Events) -> bytes:
        body = self._body("in_progress", [])
        return events.tell("response.created", response=body) + events.tell(
            "response.in_progress", response=body
        )

    def _earlier(self) -> Any:
        if self.wanted.previous_response_id is None:
            return ()
        stored = self.store.get(self.owner, self.wanted.previous_response_id)
        if stored is None:
            raise InvalidRequest(
                "previous_response_id names no stored response: it was never stored, or is kept no longer",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.messages

    async def _chat(self) -> ChatInput:
        wanted = self.wanted
        due = deadline(self.started, wanted.deadline_ms)
        async with fetched_by(due):
            messages = await conversation(self.dialogue.messages, self.desk, self.owner, self.defaults)
        return ChatInput(
            request_id=self.id,
            messages=messages,
            sampling=self.sampling,
            stop=wanted.stop_texts(),
            template_kwargs=self.template_kwargs,
            owner=self.owner,
            priority=wanted.priority or 0,
            deadline=due,
            cache_salt=wanted.cache_salt,
        )

    # ------------------------------------------------------------ what is answered

    def _finished(self, output: Output, last: TextOutput) -> dict[str, Any]:
        """The response as a whole, which is stored if it may be."""
        body = self._body(_status(last), output.items, usage=last.usage)
        if self.wanted.store is not False:
            messages = (*self.dialogue.kept, *messages_of(output.items))
            self.store.put(self.owner, self.id, StoredResponse(body, self.wanted.input, messages))
        return body

    def _body(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        usage: Usage | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        wanted = self.wanted
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.max_output_tokens,
            "model": self.service.model_name,
            "output": output,
            "parallel_tool_calls": wanted.parallel_tool_calls is not False,
            "previous_response_id": wanted.previous_response_id,
            "reasoning": wanted.reasoning or ReasoningFields(),
            "store": wanted.store is not False,
            "temperature": self.sampling.temperature,
            "text": {"format": _format(wanted.format)},
            "tool_choice": wanted.tool_choice or "auto",
            "tools": [_tool(tool) for tool in wanted.tools or ()],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
            "user": wanted.user,
            "metadata": wanted.metadata or {},
        }


class Page(Struct, kw_only=True):
    """Which of a list are wanted: ``limit`` of them behind the one that is called ``after``."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None

    def of(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        items = items if self.order == "asc" else items[::-1]
        start = 0
        if self.after is not None:
            start = 1 + next((i for i, item in enumerate(items) if item["id"] == self.after), len(items))
        page = items[start : start + self.limit]
        ids = [item["id"] for item in page] or [None]
        more = len(items) > start + self.limit
        return {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1], "has_more": more}


def nested_tools(tools: Any) -> Any:
    """Flat tools in the form of the chat endpoint; what is no tool is left for its check to name."""
    if not isinstance(tools, list):
        return tools
    return [_nested(tool) if isinstance(tool, Mapping) else tool for tool in tools]


def nested_choice(choice: Any) -> Any:
    """A named function in the form of the chat endpoint."""
    return _nested(choice) if isinstance(choice, Mapping) else choice


def _nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": fields.get("type"), "function": {k: v for k, v in fields.items() if k != "type"}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"parameters": None, "strict": False, **tool}


def _format(wanted: TextFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return {"name": "answer", **{k: v for k, v in structs.asdict(wanted).items() if v is not None}}


def _status(last: TextOutput) -> str:
    return "incomplete" if last.finish_reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": 0,
            "text_tokens": usage.prompt_tokens - usage.image_tokens - usage.video_tokens,
            "image_tokens": usage.image_tokens,
            "video_tokens": usage.video_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _not_stored(response_id: str) -> NotFound:
    return NotFound(f"no response {response_id[:100]!r} is stored here", param="response_id")
