"""The fake service with the bundled model's own tokenizer and template."""

from fake_service import FakeService
from msgspec.structs import replace

from mmserve.core.config import MediaOptions
from mmserve.core.messages import Message, TextPart
from mmserve.models.hub import resolve
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec


class WordService(FakeService):
    """A raw prompt is a question to it like any other."""

    def __init__(self):
        super().__init__()
        self.processor = Processor(ProcessorSpec.load(resolve("mmserve/tiny-vl")), MediaOptions())
        self.asked = []

    def tokenize(self, text):
        return self.processor.tokenize(text)

    def detokenize(self, tokens):
        return self.processor.decode(tokens, skip_special_tokens=False)

    async def generate(self, chat):
        self.asked.append(chat)
        if chat.prompt is not None:
            question = self.detokenize(self.processor.chat_tokens(chat))
            chat = replace(chat, messages=(Message("user", (TextPart(question),)),))
        async for output in super().generate(chat):
            yield output
