"""Log-probabilities of prompts as the answers show them: vLLM's extension of OpenAI's shape."""

import asyncio
from typing import Any

import msgspec

from mmserve.core.messages import PromptLogprob, PromptLogprobs

LEAST_LOGPROB = -9999.0  # what OpenAI shows for impossible tokens; JSON has no -inf


async def prompt_logprobs_body(found: PromptLogprobs | None) -> msgspec.Raw | None:
    """JSON of a list with an object for each token of the prompt, null for the first: from token ids to their
    ``logprob``, ``rank`` and ``decoded_token``, of the token itself and of the most likely ones.

    Made on another thread, since a long prompt takes a good part of a second.
    """
    return None if found is None else await asyncio.to_thread(_encoded, found)


def _encoded(found: PromptLogprobs) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode([row and _position(row) for row in found.rows()]))


def _position(row: PromptLogprob) -> dict[int, dict[str, Any]]:
    shown = {row.token_id: _entry(row.token, row.logprob, row.rank)}
    for rank, (token, text, logprob) in enumerate(row.top, 1):
        shown.setdefault(token, _entry(text, logprob, rank))
    return shown


def _entry(text: bytes, logprob: float, rank: int) -> dict[str, Any]:
    return {
        "logprob": max(logprob, LEAST_LOGPROB),
        "rank": rank,
        "decoded_token": text.decode(errors="replace"),
    }
