"""Token counts and times as the answers show them."""

from collections.abc import Sequence
from typing import Any

from mmserve.core.messages import Timings, Usage


def usage_body(usages: Sequence[Usage]) -> dict[str, Any]:
    """OpenAI's usage of one request with ``len(usages)`` choices; the prompt is counted once.

    Text, image and video tokens add up to the prompt; the cached ones are of those, not beside them, and
    reasoning tokens of the completion's.
    """
    prompt, completion = usages[0], sum(u.completion_tokens for u in usages)
    return {
        "prompt_tokens": prompt.prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt.prompt_tokens + completion,
        "prompt_tokens_details": {
            "cached_tokens": prompt.cached_tokens,
            "text_tokens": prompt.prompt_tokens - prompt.image_tokens - prompt.video_tokens,
            "image_tokens": prompt.image_tokens,
            "video_tokens": prompt.video_tokens,
        },
        "completion_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
    }


def timings_body(timings: Timings | None, started: float) -> dict[str, float | None]:
    """Seconds since the request came in (``started``, monotonic): to its scheduling, first and last token."""
    if timings is None:
        return {}

    def since(moment: float | None) -> float | None:
        return None if moment is None else round(moment - started, 6)

    return {
        "prepared_s": since(timings.arrived),
        "scheduled_s": since(timings.scheduled),
        "encoded_s": since(timings.encoded),
        "ttft_s": since(timings.first_token),
        "total_s": since(timings.finished),
    }
