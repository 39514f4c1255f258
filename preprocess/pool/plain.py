"""A conversation as it is sent to a worker: words and values alone, no media, no objects."""

from typing import Any

from mmserve.core.errors import InvalidRequest
from mmserve.core.messages import ChatInput, Message, Part, SamplingParams, TextPart
from mmserve.preprocess.pool.bulk import unloaded
from mmserve.preprocess.pool.messages import plain_int
from mmserve.preprocess.tokenizer import whole


def plain_chat(chat: ChatInput) -> ChatInput:
    """What laying out a prompt reads of ``chat``, in forms that can be sent.

    InvalidRequest when its values are nested beyond what any template could walk through.
    """
    try:
        return ChatInput(
            request_id="",
            messages=tuple(map(_message, chat.messages)),
            sampling=SamplingParams(bad_words=tuple(map(whole, chat.sampling.bad_words))),
            add_generation_prompt=chat.add_generation_prompt,
            template_kwargs=_plain(chat.template_kwargs),
            prompt=_prompt(chat.prompt),
        )
    except RecursionError:
        raise InvalidRequest("the messages are nested too deeply", param="messages") from None


def _prompt(prompt: str | tuple[int, ...] | None) -> str | tuple[int, ...] | None:
    if not isinstance(prompt, tuple):
        return prompt and whole(prompt)
    for token in prompt:
        if not isinstance(plain_int(token), int):
            raise InvalidRequest(f"there is no token {token}", param="prompt")
    return prompt


def _message(message: Message) -> Message:
    return Message(whole(message.role), tuple(map(_part, message.content)), _plain(message.extra))


def _part(part: Part) -> Part:
    return TextPart(whole(part.text)) if isinstance(part, TextPart) else unloaded(part)


def _plain(value: Any) -> Any:
    """As ``Marker.tree`` sees a value: other kinds than those of JSON are told by the name of their type."""
    if isinstance(value, str):
        return whole(str(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return plain_int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, dict):
        return {whole(str(k)): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return f"<{type(value).__name__}>"
