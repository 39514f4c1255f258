"""What the engine asks of a library for structured output."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from mmserve.core.messages import Grammar

# How JSON is written in an answer: on one line, as the models' training has it. A model that may put white
# space where it likes can fill its whole answer with it.
JSON_SEPARATORS = (", ", ": ")  # of items, and of a key and its value
JSON_FORM = {
    "whitespace_flexible": False,
    "item_separator": JSON_SEPARATORS[0],
    "key_separator": JSON_SEPARATORS[1],
}

BitRow = npt.NDArray[np.int32]  # bit t of word t // 32: whether token t may come next


class GrammarFault(Exception):
    """A matcher met a token or a state that it cannot go on from. It ends one request."""


class Matcher(Protocol):
    """One answer on its way through a grammar."""

    @property
    def complete(self) -> bool:
        """Whether the form is whole and nothing more can be added."""

    @property
    def free(self) -> bool:
        """Whether anything may come from now on, so that nobody need ask again."""

    def fill(self, row: BitRow) -> None:
        """Set ``row`` [ceil(vocab / 32)] to the tokens that may come next. GrammarFault if that fails."""

    def accept(self, token: int) -> None:
        """Take the token that was chosen. GrammarFault unless it is one of those allowed."""

    def copy(self) -> "Matcher":
        """Another one in the same state."""


class GrammarBackend(Protocol):
    """Makes matchers for one model's tokenizer, from any thread."""

    name: str

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at its beginning. InvalidRequest says what is wrong with ``grammar``. Slow."""
