"""What the REST endpoints accept: wrong types and ranges are errors that name the field.

Unknown fields are ignored, as OpenAI does; known fields that this server cannot honour are refused,
never silently dropped.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from mmserve.core.errors import InvalidRequest
from mmserve.core.thinking import OPEN
from mmserve.media_options import Kind, Options, request_options
from mmserve.parsing.toolbox import Toolbox
from mmserve.server.deadline import DeadlineMs
from mmserve.server.errors import UnsupportedMediaType, unsupported
from mmserve.server.forms import ResponseFormat, StructuredOutputs

INCLUDABLE = ("media",)

Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Priority = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1)]
TokenId = Annotated[int, Meta(ge=0)]
StopText = Annotated[str, Meta(min_length=1)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]


class RefusedFields(Struct, kw_only=True):
    """What OpenAI's and vLLM's documents know of sampling and prompts and this server cannot honour: a value
    that asks for something is an error.

    ``add_special_tokens`` and ``spaces_between_special_tokens`` are not among them, nor anywhere: with the
    tokenizers of these models they make no difference.
    """

    audio: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    function_call: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    include_reasoning: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    prediction: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    return_prompt_text: Any = None
    return_token_ids: Any = None
    return_token_offsets: Any = None
    return_tokens_as_token_ids: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    use_beam_search: Any = None
    verbosity: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None
    web_search_options: Any = None

    def refuse(self) -> None:
        """InvalidRequest for the first of these fields that asks for something."""
        for name in RefusedFields.__struct_fields__:
            value = getattr(self, name)
            if value is not None and value not in IDLE.get(name, (False, [], {})):
                raise unsupported(name, f"{name} is not supported by this server" + ADVICE.get(name, ""))


# Values that ask for nothing, where these are not false or empty.
IDLE: dict[str, tuple[Any, ...]] = {
    "function_call": ("none",),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "verbosity": ("medium",),
}
ADVICE = {
    "function_call": "; send tools and tool_choice",
    "use_beam_search": "; n draws several answers",
    "logprob_token_ids": "; top_logprobs tells the most likely tokens",
} | {
    f"guided_{kind}": f"; send structured_outputs with {kind}"
    for kind in ("json", "regex", "choice", "grammar")
}


class SamplingFields(RefusedFields, kw_only=True):
    """The fields that say how to sample; None means the model's default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    max_tokens: Positive | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=128)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputs | None = None

    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class TalkFields(SamplingFields, kw_only=True):
    """What the endpoints of conversations have in common."""

    model: str | None = None
    stream: bool | None = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Annotated[int, Meta(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    priority: Priority | None = None
    deadline_ms: DeadlineMs | None = None
    cache_salt: str | None = None

    def template_kwargs(self, tools: Toolbox) -> dict[str, Any]:
        """What goes to the chat template beside the messages; of ``tools`` what the model is shown."""
        kwargs = dict(self.chat_template_kwargs or {})
        wanted = self.enable_thinking
        if wanted is not None and kwargs.setdefault("enable_thinking", wanted) != wanted:
            raise InvalidRequest(
                "enable_thinking contradicts chat_template_kwargs.enable_thinking; give one",
                param="enable_thinking",
            )
        if tools.callable:
            kwargs["tools"] = list(tools.shown)
        return kwargs

    def budget(self, template: str | None) -> int | None:
        """``thinking_token_budget``; InvalidRequest if the chat ``template`` knows no thoughts."""
        if self.thinking_token_budget is not None and OPEN not in (template or ""):
            raise unsupported(
                "thinking_token_budget", "this model does not think; leave out thinking_token_budget"
            )
        return self.thinking_token_budget

    def media_options(self) -> dict[Kind, Options]:
        """What the request asks for every picture, and for every clip, that says nothing itself."""
        return request_options(self.mm_processor_kwargs, self.media_io_kwargs)


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None


class ChatRequest(TalkFields, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Any], Meta(min_length=1)]
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None
    best_of: int | None = None
    echo: bool | None = None
    reasoning_effort: Literal["none"] | None = None
    add_generation_prompt: bool | None = None
    include: list[str] | None = None
    response_format: ResponseFormat | None = None
    functions: list[Any] | None = None
    modalities: list[str] | None = None

    def check(self) -> None:
        """InvalidRequest for fields that contradict each other or that this server cannot honour."""
        self.refuse()
        check_best_of(self.best_of, self.n)
        if self.echo:
            raise unsupported("echo", "an answer is told without the prompt here; leave echo out")
        if self.prompt_logprobs is not None and self.stream:
            raise unsupported("prompt_logprobs", "prompt_logprobs are not told in a stream; leave stream out")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed with stream: true", param="stream_options")
        if self.functions:
            raise unsupported("functions", "functions are not supported by this server; send them as tools")
        if set(self.modalities or ()) - {"text"}:
            raise unsupported("modalities", "an answer other than text is not supported by this server")
        check_include(self.include)

    def template_kwargs(self, tools: Toolbox) -> dict[str, Any]:
        kwargs = super().template_kwargs(tools)
        if self.reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
        return kwargs

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class MediaFields(Struct, kw_only=True):
    """One picture or clip of a body, and what is asked of it."""

    image_url: Any = None
    image: str | None = None
    video_url: Any = None
    video: str | None = None
    media_id: str | None = None
    min_pixels: Positive | None = None
    max_pixels: Positive | None = None
    detail: str | None = None
    rgba_background_color: list[int] | None = None
    fps: Annotated[float, Meta(gt=0)] | None = None
    num_frames: Positive | None = None
    timestamps: list[float] | None = None
    video_pruning_rate: Annotated[float, Meta(ge=0, lt=1)] | None = None


class CaptionRequest(SamplingFields, kw_only=True):
    """Body of POST /v1/captions beside the fields of the picture or clip itself."""

    prompt: str | None = None
    deadline_ms: DeadlineMs | None = None
    model: str | None = None
    stream: bool | None = None
    include: list[str] | str | None = None

    def includes(self) -> list[str]:
        return self.include.split(",") if isinstance(self.include, str) else self.include or []


Body = TypeVar("Body")


async def read_json(request: Request, kind: type[Body]) -> Body:
    """The request's JSON body as a ``kind``; InvalidRequest names the field that is wrong."""
    content_type = request.headers.get("content-type", "application/json")
    if "json" not in content_type:
        raise UnsupportedMediaType(f"the content type must be application/json, not {content_type}")
    return decode(await request.body(), kind)


def decode(body: bytes | str, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as e:
        raise _invalid(str(e)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidRequest(f"the body is not valid JSON: {e}", code="invalid_json") from None


def convert(fields: Mapping[str, Any], kind: type[Body], *, strict: bool = True) -> Body:
    """The plain fields of a body as a ``kind``; not ``strict`` those of a form, which are all text."""
    try:
        return msgspec.convert(fields, kind, strict=strict, str_keys=True)
    except msgspec.ValidationError as e:
        raise _invalid(str(e)) from None


def check_best_of(best_of: int | None, n: int | None) -> None:
    """InvalidRequest where fewer answers are to be given out than made."""
    if best_of is not None and best_of != (n or 1):
        raise unsupported("best_of", "best_of may only be n: every answer is given out, none is chosen")


def check_include(wanted: Sequence[str] | None) -> None:
    """InvalidRequest for what an answer cannot carry."""
    for name in wanted or ():
        if name not in INCLUDABLE:
            raise InvalidRequest(
                f"include takes {', '.join(INCLUDABLE)}; not {name[:100]!r}", param="include"
            )


def _invalid(message: str) -> InvalidRequest:
    """``Expected `float` <= 2.0 - at `$.temperature``` becomes ``temperature: expected float <= 2.0``."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`", message)
    if missing:
        return InvalidRequest(
            f"{missing[1]} is required", param=missing[1], code="missing_required_parameter"
        )
    what, _, where = message.partition(" - at ")
    path = re.search(r"\$\.?([^`]*)`", where)
    param = path[1].removesuffix("[...]") if path else None
    what = what.replace("`", "")
    return InvalidRequest(f"{param or 'the body'}: {what[0].lower()}{what[1:]}", param=param or None)
