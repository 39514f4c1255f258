"""What goes wrong in the engine, told to a caller."""

import pytest

from mmserve.core.errors import DeadlineExceeded, InvalidGrammar, MMServeError, NoTokenAllowed
from mmserve.core.messages import ChatInput, Grammar, SamplingParams, TextOutput
from mmserve.generation import whole


class Failing:
    def __init__(self, code):
        self.code = code

    async def generate(self, chat):
        yield TextOutput(request_id="r", text="", finish_reason="error", error="why", error_code=self.code)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (NoTokenAllowed.code, (400, "no_token_allowed")),
        (InvalidGrammar.code, (400, "invalid_grammar")),
        (DeadlineExceeded.code, (504, "deadline_exceeded")),
        (None, (500, "generation_failed")),
    ],
)
async def test_only_what_the_caller_can_mend_is_a_400(code, said):
    with pytest.raises(MMServeError, match="why") as caught:
        await whole(Failing(code), ChatInput(request_id="r", messages=(), sampling=SamplingParams()))
    assert (caught.value.status, caught.value.code) == said


async def test_a_form_that_cannot_be_kept_to_is_named_as_the_caller_wrote_it():
    sampling = SamplingParams(grammar=Grammar("regex", "a", "structured_outputs.regex"))
    with pytest.raises(InvalidGrammar) as caught:
        await whole(Failing(InvalidGrammar.code), ChatInput(request_id="r", messages=(), sampling=sampling))
    assert caught.value.param == "structured_outputs.regex"
