"""What the parts say to each other, from the caller's words to the engine's tokens and back.

    ChatInput ──preprocess──▶ PreparedRequest ──engine──▶ TokenOutput ──detokenizer──▶ TextOutput

Arrays are numpy; nothing here knows torch, HTTP or a file format.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from mmserve.core.thinking import Start, Thinking

FinishReason = Literal["stop", "length", "abort", "error"]


# ---------------------------------------------------------------- the caller's words


class TextPart(Struct, frozen=True, tag="text"):
    """Literal text: reserved tokens inside it stay text and cannot bind to media."""

    text: str


class ImagePart(Struct, frozen=True, tag="image"):
    """A picture: an encoded file in ``data`` (JPEG, PNG, ...), or uint8 RGB ``pixels`` [H, W, 3].

    ``background`` is the RGB colour under transparent pixels, where the request has its own wish. ``param``
    is where the part stood in the caller's request, for error messages.
    """

    data: bytes | None = None
    pixels: np.ndarray | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    background: tuple[int, int, int] | None = None
    param: str | None = None


class VideoPart(Struct, frozen=True, tag="video"):
    """A clip: an encoded file, or frames that were cut already, with their ``timestamps`` in seconds.

    Frames come as encoded ``pictures``, one a frame, or as uint8 RGB ``frames`` [F, H, W, 3].
    ``video_pruning_rate`` is the most of its tokens, from 0 to below 1, that may be left out because they
    show what was there before; None is as configured. A clip of one item may go on from one before it: then
    ``reference`` is the ``Medium``'s own of that. ``kept`` are cells of such a clip that were chosen already.
    """

    data: bytes | None = None
    frames: np.ndarray | None = None
    pictures: tuple[bytes, ...] | None = None
    timestamps: tuple[float, ...] | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_pruning_rate: float | None = None
    reference: np.ndarray | None = None
    kept: np.ndarray | None = None
    param: str | None = None


Part = TextPart | ImagePart | VideoPart


class Message(Struct, frozen=True):
    """One turn of a conversation. The order of the parts is their order in the prompt."""

    role: str
    content: tuple[Part, ...]
    extra: dict[str, Any] = {}


class Grammar(Struct, frozen=True):
    """The form that an answer must have. ``source`` is the JSON schema, the regular expression, a JSON list
    of the strings to choose from, or a grammar in Lark's notation; nothing for any JSON object. ``param`` is
    where it stood in the caller's request."""

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    source: str = ""
    param: str | None = None


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when a request ends. ``temperature`` 0 is greedy.

    ``top_k`` 0 and ``top_p`` 1 and ``min_p`` 0 are off. ``logprobs`` is None (off) or the number of
    alternatives to report beside the chosen token. ``max_tokens`` None means up to the context's end.
    ``thinking_budget`` is the most tokens that a model may think before it answers; None is no limit.
    ``prompt_logprobs`` asks for the prompt's log-probabilities, with so many alternatives for each token.
    ``bad_words`` never come in an answer, at the beginning of a word or behind a space; of
    ``allowed_token_ids``, where there are any, all tokens are taken. ``skip_special_tokens`` keeps special
    tokens out of the text, ``include_stop_str_in_output`` leaves what ended it at its end.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    logprobs: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thinking_budget: int | None = None
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class ChatInput(Struct, frozen=True, kw_only=True):
    """A request before preprocessing. ``template_kwargs`` go to the model's own chat template.

    A raw ``prompt``, a text or token ids, takes the template's place: its reserved tokens count, its
    placeholders take the messages' media in order. ``deadline`` is in seconds of ``time.monotonic``: what is
    not prepared by then, or has no first token, is given up. ``owner`` is whom it is computed for: those who
    wait are served in fair turns.
    """

    request_id: str
    messages: tuple[Message, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = {}
    prompt: str | tuple[int, ...] | None = None
    owner: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None


# ---------------------------------------------------------------- what became of it


@dataclass(frozen=True)
class Seen:
    """What the model saw of a part, for whoever asks. Sizes are (height, width), upright.

    ``timestamps`` are seconds of the frames kept, ``tokens`` the vision tokens, ``dropped_tokens`` those that
    were left out for showing nothing new, ``warnings`` what was left out and why.
    """

    kind: Literal["image", "video"]
    format: str
    source_size: tuple[int, int]
    size: tuple[int, int]
    grid: tuple[int, int]
    tokens: int
    dropped_tokens: int = 0
    orientation: int = 1
    timestamps: tuple[float, ...] = ()
    warnings: tuple[str, ...] = ()
    cached: bool = False


# ---------------------------------------------------------------- the engine's input


class VisionItem(Struct, frozen=True, kw_only=True):
    """One temporal patch: a still image, or two consecutive frames of a clip (DESIGN section 2).

    ``pixels`` is uint8 RGB after the resize, ``[frames, H, W, 3]`` with frames 1 (a still, which the
    encoder counts twice) or 2; None where the encoder is thought to hold ``digest`` already. ``grid`` is
    (H / patch, W / patch). ``span`` is the half-open range of its tokens in the prompt. ``kept`` are the
    cells of the merged grid that are its tokens, int32 and ascending, None for all: the encoder sees the
    whole item, and the features of the others are not kept. ``digest`` is 32 bytes over the pixels, the cells
    and every option that matters.
    """

    digest: bytes
    kind: Literal["image", "video"]
    grid: tuple[int, int]
    span: tuple[int, int]
    pixels: np.ndarray | None
    timestamp: float | None = None
    kept: np.ndarray | None = None


class PreparedRequest(Struct, frozen=True, kw_only=True):
    """What the engine needs: ``token_ids`` int32 [N], ``radix_keys`` int64 [N], ``positions`` int32 [3, N].

    ``radix_keys`` equals ``token_ids`` except under an item, where it is derived from the digest.
    The position of generated token number g (from 0) is ``N + g + position_delta`` on all three axes.
    ``thinking`` is how thoughts are told in the answer; None where there will be none. ``bad_words`` are
    those of ``sampling`` as tokens, in every way they are written.
    A ``warm`` request has no answer: its whole pages are computed and cached for those that begin like it,
    and its only output ends it with "stop" and without a token. It takes no grammar and no
    ``prompt_logprobs``.
    """

    request_id: str
    token_ids: np.ndarray
    radix_keys: np.ndarray
    positions: np.ndarray
    position_delta: int
    items: tuple[VisionItem, ...]
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    owner: str = ""
    priority: int = 0
    deadline: float | None = None
    cache_salt: str | None = None
    adapter: str | None = None
    thinking: Thinking | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    warm: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class CarryOver(Struct, frozen=True, kw_only=True):
    """What of a cached prompt goes on under another salt, when a window of its context is dropped.

    ``keys`` int64 [N] are the radix keys of the prompt, cached under ``salt``. ``kept`` are half-open ranges
    of its tokens, in ascending order: joined, they are the prompt that is cached under ``new_salt``
    afterwards. Their keys and values stay as they are, also where what they were computed from is dropped.
    All keep their positions, but for a ``shift``, which is taken from the positions of all but the first
    ``head`` ranges, on the three axes alike. ``retire``: nobody will ask for ``salt`` again, so what is
    cached there is the first to be given up. With nothing ``kept`` that is all that is done.
    """

    keys: np.ndarray
    kept: tuple[tuple[int, int], ...]
    new_salt: str
    salt: str | None = None
    shift: int = 0
    head: int = 0
    retire: bool = False


# ---------------------------------------------------------------- the engine's output


class TokenLogprob(Struct, frozen=True):
    """Log-probability of a chosen token, and of the most likely alternatives as (token, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class PromptLogprob(Struct, frozen=True):
    """Of one token of a prompt: its log-probability given what stands before it, its ``rank`` among all (1 is
    the most likely), and the most likely tokens as (token, its bytes, logprob)."""

    token_id: int
    token: bytes
    logprob: float
    rank: int
    top: tuple[tuple[int, bytes, float], ...] = ()


class PromptLogprobs(Struct, frozen=True):
    """Of a whole prompt of N tokens, as arrays: a long prompt has hundreds of thousands of numbers.

    ``token_ids`` int32 [N]; of those from the second on, ``logprobs`` float32 and ``ranks`` int32 [N - 1],
    ``top_ids`` int32 and ``top_logprobs`` float32 [N - 1, count], the most likely first. ``texts`` are the
    bytes of every token among them, once they are known.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    texts: dict[int, bytes] = {}

    def rows(self) -> Iterator[PromptLogprob | None]:
        """Token after token; None for the first, before which there is nothing."""
        yield None
        columns = (self.token_ids[1:], self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        texts = self.texts
        for token, logprob, rank, ids, values in zip(*(c.tolist() for c in columns), strict=True):
            top = tuple((i, texts.get(i, b""), v) for i, v in zip(ids, values, strict=True))
            yield PromptLogprob(token, texts.get(token, b""), logprob, rank, top)


class Timings(Struct, frozen=True):
    """Monotonic seconds (``time.monotonic``) of a request's life in the engine; None until it happened."""

    arrived: float
    scheduled: float | None = None
    encoded: float | None = None
    first_token: float | None = None
    finished: float | None = None

    def ended(self) -> "Timings":
        """The same, but finished: at this moment, if it was not before."""
        return replace(self, finished=self.finished or time.monotonic())


class TokenOutput(Struct, frozen=True, kw_only=True):
    """New tokens of one request after one step. Exactly one output per request has a ``finish_reason``; the
    first has ``prompt_logprobs``, if they were asked for."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    timings: Timings | None = None


class PixelsWanted(Struct, frozen=True):
    """A request waits inside the engine: features that it needs were dropped, and their pixels before them.

    It goes on when the pixels of all ``digests`` are supplied; nothing that it has said is said again.
    """

    request_id: str
    digests: frozenset[bytes]


class Usage(Struct, frozen=True):
    """Token counts of one request so far. ``reasoning_tokens`` are of the completion's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int = 0
    video_tokens: int = 0
    reasoning_tokens: int = 0


class TextLogprob(Struct, frozen=True):
    """A ``TokenLogprob`` with the tokens as bytes, as the OpenAI answer shows them."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class TextOutput(Struct, frozen=True, kw_only=True):
    """New text of one request: whole characters only, and never a part of a stop string.

    The first has the ``prompt_logprobs``, if they were asked for.
    ``media``, what was seen of each picture and clip, and ``start``, where the answer begins, are the same in
    every piece.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    error_code: str | None = None
    usage: Usage = Usage()
    timings: Timings | None = None
    media: tuple[Seen, ...] = ()
    start: Start = Start.OUTSIDE
