"""What a request may ask for; refused here before it takes anything."""

from mmserve.core.errors import ContextLengthExceeded, InvalidRequest
from mmserve.core.messages import PreparedRequest, SamplingParams

MAX_LOGPROBS = 20
MAX_BAD_WORDS = (128, 256)  # how many, and characters of each


def answer_length(request: PreparedRequest, max_len: int) -> int:
    """Most tokens that ``request`` may generate; ContextLengthExceeded if it asks for more than fits. A
    warm one has no answer; InvalidRequest if it asks for a part of one."""
    if request.warm:
        _check_warm(request, max_len)
        return 0
    prompt, wanted = request.num_tokens, request.sampling.max_tokens
    if prompt >= max_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens{_of_media(request)}, which leaves no room for an answer: prompt"
            f" and answer together may have {max_len} tokens{_advice(request)}",
            param="messages",
        )
    if wanted is None:
        return max_len - prompt
    if prompt + wanted > max_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens{_of_media(request)} and max_tokens asks for {wanted} more,"
            f" {prompt + wanted} in all: together they may have {max_len} tokens{_advice(request)}",
            param="max_tokens",
        )
    return wanted


def _check_warm(request: PreparedRequest, max_len: int) -> None:
    if request.num_tokens > max_len:
        raise ContextLengthExceeded(
            f"there are {request.num_tokens} tokens{_of_media(request)} to keep ready: there may be {max_len}"
            f"{_advice(request)}",
            param="messages",
        )
    for name in ("grammar", "prompt_logprobs"):
        if getattr(request.sampling, name) is not None:
            raise InvalidRequest(f"a warm request has no answer, so it takes no {name}", param=name)


def _of_media(request: PreparedRequest) -> str:
    count = sum(stop - start for start, stop in (item.span for item in request.items))
    return f" ({count} of them for pictures and clips)" if count else ""


def _advice(request: PreparedRequest) -> str:
    if not request.items:
        return ""
    clips = any(item.kind == "video" for item in request.items)
    repeats = ", video_pruning_rate leaves out what a clip repeats" if clips else ""
    return f"; max_pixels beside a picture or in mm_processor_kwargs makes it smaller{repeats}"


def check_sampling(params: SamplingParams, vocab: int) -> None:
    """InvalidRequest, naming the field, unless every value is in its range."""
    for name, fine, allowed in _rules(params):
        if not fine:
            raise InvalidRequest(f"{name} must be {allowed}, not {getattr(params, name)!r}", param=name)
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        strangers = [t for t in getattr(params, name) if not 0 <= t < vocab]
        if strangers:
            raise InvalidRequest(
                f"{name} has token {strangers[0]}, but this model's tokens are 0 to {vocab - 1}", param=name
            )


def _rules(p: SamplingParams) -> list[tuple[str, bool, str]]:
    return [
        ("temperature", 0 <= p.temperature < float("inf"), "a number from 0 up"),
        ("top_k", p.top_k >= 0, "0 (off) or more"),
        ("top_p", 0 <= p.top_p <= 1, "from 0 to 1"),
        ("min_p", 0 <= p.min_p <= 1, "from 0 to 1"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, "from -2 to 2"),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, "from -2 to 2"),
        ("repetition_penalty", 0.01 <= p.repetition_penalty <= 100, "from 0.01 to 100"),
        (
            "logit_bias",
            all(-100 <= v <= 100 for v in p.logit_bias.values()),
            "from -100 to 100 each",
        ),
        (
            "bad_words",
            len(p.bad_words) <= MAX_BAD_WORDS[0]
            and all(isinstance(w, str) and 0 < len(w) <= MAX_BAD_WORDS[1] for w in p.bad_words),
            f"at most {MAX_BAD_WORDS[0]} words, each of 1 to {MAX_BAD_WORDS[1]} characters",
        ),
        ("max_tokens", p.max_tokens is None or p.max_tokens > 0, "at least 1"),
        ("min_tokens", p.min_tokens >= 0, "0 or more"),
        ("thinking_budget", p.thinking_budget is None or p.thinking_budget >= 0, "0 or more"),
        *(
            (name, count is None or 0 <= count <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
            for name, count in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs))
        ),
    ]
