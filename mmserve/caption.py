"""A caption: one picture or clip, one question about it, the most likely answer."""

from mmserve.core.messages import ChatInput, ImagePart, Message, SamplingParams, TextPart, VideoPart

PROMPTS = {ImagePart: "Describe this image.", VideoPart: "Describe this video."}
MAX_TOKENS = 256


def caption_chat(
    request_id: str,
    media: ImagePart | VideoPart,
    prompt: str | None = None,
    sampling: SamplingParams | None = None,
    stop: tuple[str, ...] = (),
) -> ChatInput:
    """The chat that asks for a caption; greedy and at most MAX_TOKENS long if not told otherwise.

    A model that may think before it answers is asked not to: thoughts would take a caption's few tokens.
    """
    return ChatInput(
        request_id=request_id,
        messages=(Message("user", (media, TextPart(prompt or PROMPTS[type(media)]))),),
        sampling=sampling or SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        stop=stop,
        template_kwargs={"enable_thinking": False},
    )
