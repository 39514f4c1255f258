"""Sampling parameters: what the request says, else what the model's makers advise, else OpenAI's defaults."""

from collections.abc import Mapping
from typing import Any

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import SamplingParams
from mmserve.server.protocol import SamplingFields

SMALLEST_TOP_P = 1e-6  # top_p 0 is allowed and means the most likely token
ADVISED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (*ADVISED, "seed", "presence_penalty", "frequency_penalty", "min_tokens", "ignore_eos")


def sampling_params(
    wanted: SamplingFields,
    advice: Mapping[str, Any],
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
) -> SamplingParams:
    """``advice`` is the model's own generation settings; token ids are checked against ``vocab_size``."""
    fields = {name: advice[name] for name in ADVISED if advice.get(name) is not None}
    fields |= {name: getattr(wanted, name) for name in _PLAIN if getattr(wanted, name) is not None}
    fields["top_k"] = max(0, fields.get("top_k", 0))
    fields["top_p"] = max(SMALLEST_TOP_P, fields.get("top_p", 1.0))
    bias, stops = wanted.logit_bias or {}, tuple(wanted.stop_token_ids or ())
    _check_ids(bias, vocab_size, "logit_bias")
    _check_ids(stops, vocab_size, "stop_token_ids")
    if max_tokens is not None and fields.get("min_tokens", 0) > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens})", param="min_tokens")
    return SamplingParams(
        **fields, logit_bias=bias, stop_token_ids=stops, max_tokens=max_tokens, logprobs=logprobs
    )


def _check_ids(ids: Any, vocab_size: int, param: str) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})", param=param
            )
