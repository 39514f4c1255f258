"""Sampling parameters of a request."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mmserve.advice import advised
from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import Grammar, SamplingParams
from mmserve.preprocess.spec import SAMPLING_FIELDS
from mmserve.server.protocol import SamplingFields

_PLAIN = (
    *SAMPLING_FIELDS,
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


def sampling_params(
    wanted: SamplingFields,
    advice: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    form: Grammar | None = None,
    thinking_budget: int | None = None,
) -> SamplingParams:
    """``advice`` is the model's own generation settings. Token ids and grammars are the engine's to check."""
    if max_tokens is not None and (wanted.min_tokens or 0) > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens})", param="min_tokens")
    return advised(
        advice,
        **{name: getattr(wanted, name) for name in _PLAIN},
        logit_bias=wanted.logit_bias or {},
        stop_token_ids=tuple(wanted.stop_token_ids or ()),
        allowed_token_ids=tuple(wanted.allowed_token_ids or ()),
        bad_words=tuple(wanted.bad_words or ()),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=form,
        thinking_budget=thinking_budget,
    )


def reseeded(sampling: SamplingParams, index: int) -> SamplingParams:
    """The choices of one request differ, and each stays the same for the same seed."""
    if sampling.seed is None or index == 0:
        return sampling
    return replace(sampling, seed=sampling.seed + index)
