"""One answer in the making: tokens in, text out, and the count of both."""

from msgspec import Struct, structs

from mmserve.core.messages import (
    FinishReason,
    PreparedRequest,
    PromptLogprobs,
    SamplingParams,
    TextLogprob,
    TextOutput,
    Timings,
    TokenLogprob,
    TokenOutput,
    Usage,
)
from mmserve.core.thinking import Thinking, ThoughtCount
from mmserve.engine.detokenizer import Detokenizer, TokenBytes


class Brief(Struct, frozen=True):
    """What the making of an answer needs to know of its request."""

    request_id: str
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    thinking: Thinking | None = None

    @classmethod
    def of(cls, request: PreparedRequest) -> "Brief":
        """Without the form, the biases and the words, which are the engine's matter and may be large."""
        sampling = structs.replace(
            request.sampling, grammar=None, logit_bias={}, bad_words=(), allowed_token_ids=()
        )
        return cls(request.request_id, sampling, request.stop, request.thinking)


class Said(Struct, frozen=True):
    """What became of one output of the engine: ``tokens`` new ones, and a ``piece`` of text if one is final.

    ``early`` marks an end by a stop string, of which the engine does not know: it is to be aborted. The piece
    lacks what only the caller's side knows: what was seen, where the answer begins, the vision tokens.
    """

    tokens: int
    timings: Timings | None = None
    piece: TextOutput | None = None
    early: bool = False

    @property
    def last(self) -> bool:
        """Whether the engine has said its last to the request."""
        return self.piece is not None and self.piece.finish_reason is not None and not self.early


class Answer:
    """Made for one request, fed with each output of the engine for it."""

    def __init__(self, brief: Brief, tokens: TokenBytes) -> None:
        self.finish_reason: FinishReason | None = None
        self._brief = brief
        self._tokens = tokens
        self._detokenizer = Detokenizer(
            tokens,
            brief.stop,
            brief.sampling.min_tokens,
            with_stop=brief.sampling.include_stop_str_in_output,
            with_special=not brief.sampling.skip_special_tokens,
        )
        self._thoughts = ThoughtCount(brief.thinking)
        self._completion = 0
        self._ids: list[int] = []  # taken since the last piece of text
        self._logprobs: list[TextLogprob] = []
        self._prompt: PromptLogprobs | None = None  # until it is given out

    def add(self, output: TokenOutput) -> Said:
        """Take the next output; its piece is None while there is nothing to show."""
        text = "".join(self._take(output))
        early = self._detokenizer.stopped and output.finish_reason is None
        self.finish_reason = "stop" if self._detokenizer.stopped else output.finish_reason
        if self.finish_reason:
            text += self._detokenizer.flush()
        timings = output.timings.ended() if early and output.timings else output.timings
        piece = self._piece(text, output, timings) if text or self.finish_reason else None
        return Said(len(output.token_ids), output.timings, piece, early)

    def _take(self, output: TokenOutput) -> list[str]:
        """The text of each token; that of a stop token is not part of the answer, unless it was asked for."""
        self._completion += len(output.token_ids)
        self._ids += output.token_ids
        self._logprobs += [self._shown(logprob) for logprob in output.logprobs or ()]
        if output.prompt_logprobs is not None:
            self._prompt = self._spelled(output.prompt_logprobs)
        spoken = output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
        for token in spoken:
            self._thoughts.add(token)
        shown = output.token_ids if self._brief.sampling.include_stop_str_in_output else spoken
        return [self._detokenizer.add(token) for token in shown]

    def _piece(self, text: str, output: TokenOutput, timings: Timings | None) -> TextOutput:
        ids, self._ids = tuple(self._ids), []
        logprobs, self._logprobs = tuple(self._logprobs), []
        prompt, self._prompt = self._prompt, None
        return TextOutput(
            request_id=self._brief.request_id,
            text=text,
            token_ids=ids,
            logprobs=None if self._brief.sampling.logprobs is None else logprobs,
            prompt_logprobs=prompt,
            finish_reason=self.finish_reason,
            error=output.error,
            error_code=output.error_code,
            usage=self._usage(output),
            timings=timings,
        )

    def _usage(self, output: TokenOutput) -> Usage:
        return Usage(
            prompt_tokens=output.prompt_tokens,
            completion_tokens=self._completion,
            cached_tokens=output.cached_tokens,
            reasoning_tokens=self._thoughts.tokens,
        )

    def _spelled(self, prompt: PromptLogprobs) -> PromptLogprobs:
        """With the bytes of every token."""
        known = {*prompt.token_ids.tolist(), *prompt.top_ids.ravel().tolist()}
        return structs.replace(prompt, texts={token: self._tokens.raw(token) for token in known})

    def _shown(self, logprob: TokenLogprob) -> TextLogprob:
        top = tuple((self._tokens.raw(token), value) for token, value in logprob.top)
        return TextLogprob(self._tokens.raw(logprob.token_id), logprob.logprob, top)
