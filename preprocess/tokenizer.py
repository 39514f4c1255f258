"""Text to token ids, with the caller's words kept apart from the template's."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from mmserve.core.errors import ModelLoadError
from mmserve.preprocess.spec import ProcessorSpec

# Added tokens that steer the model. Others (<think>, <tool_call>, ...) are words that anyone may write.
_CONTROL = re.compile(r"<\|.*\|>", re.DOTALL)


class TextTokenizer:
    """The model's own tokenizer, and the same without its added tokens.

    Reserved are the added tokens that the tokenizer calls special, and all of the form ``<|...|>``.
    """

    def __init__(self, spec: ProcessorSpec) -> None:
        try:
            self._full = Tokenizer.from_str(spec.tokenizer_json)
        except Exception as error:  # the tokenizers library raises plain Exception
            raise ModelLoadError(f"{spec.folder / 'tokenizer.json'} cannot be used: {error}") from None
        self._full.no_truncation()
        self._full.no_padding()
        self._literal = _without_added(self._full)
        added = self._full.get_added_tokens_decoder()
        self._added = {token.content: i for i, token in added.items()}
        self.size = max([self._literal.get_vocab_size(), *(i + 1 for i in added)])  # ids are 0 to size - 1
        self.reserved = tuple(t.content for t in added.values() if t.special or _CONTROL.fullmatch(t.content))
        longest_first = sorted(self._added, key=len, reverse=True)
        self._cuts = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None

    def encode(self, text: str) -> list[int]:
        """Token ids of trusted text: reserved tokens are what they say."""
        return list(self._full.encode(whole(text), add_special_tokens=False).ids)

    def encode_literal(self, text: str) -> list[int]:
        """Token ids of a caller's text: added tokens are spelled out like any other characters."""
        return list(self._literal.encode(whole(text), add_special_tokens=False).ids)

    def encode_marked(self, text: str, marker: "Marker") -> list[int]:
        """Token ids of a rendered template: reserved tokens count unless ``marker`` broke them up.

        Equal to ``encode`` when there is no mark in ``text``.
        """
        if marker.mark not in text or self._cuts is None:
            return self.encode(text)
        ids: list[int] = []
        for piece in self._cuts.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece:
                ids += self.encode_literal(marker.clean(piece))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special_tokens))


def whole(text: str) -> str:
    """Text that has a UTF-8 form: lone surrogates, which JSON can carry, become replacement characters."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _without_added(full: Tokenizer) -> Tokenizer:
    """The same vocabulary and rules (shared, not copied) with no added tokens."""
    literal = Tokenizer(full.model)
    if full.normalizer is not None:
        literal.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        literal.pre_tokenizer = full.pre_tokenizer
    return literal


class Marker:
    """Breaks up reserved tokens in a caller's strings, so that a template may treat them as it likes.

    A mark is put inside the first two characters of whatever could be or become a reserved token, also
    where two parts might be joined. Nobody can guess the mark; ``clean`` takes it out again. Ordinary
    text is left as it is, so templates that test or trim the text see the text itself.
    """

    def __init__(self, reserved: Sequence[str]) -> None:
        self.mark = "m" + secrets.token_hex(16)
        starts = sorted(
            {re.escape(t[:1]) + "(?=" + re.escape(t[1:2]) + "|$)" for t in reserved if len(t) > 1}
        )
        self._starts = re.compile("|".join(starts)) if starts else None
        self._seconds = tuple({t[1] for t in reserved if len(t) > 1})

    def text(self, text: str) -> str:
        if self._starts is None:
            return text
        marked = self._starts.sub(lambda m: m.group() + self.mark, text)
        return self.mark + marked if marked.startswith(self._seconds) else marked

    def tree(self, value: Any) -> Any:
        """Every string inside ``value`` (lists, tuples, dictionaries) marked; other kinds made plain."""
        if isinstance(value, str):
            return self.text(str(value))
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, dict):
            return {self.text(str(k)): self.tree(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.tree(v) for v in value]
        return f"<{type(value).__name__}>"

    def clean(self, text: str) -> str:
        return text.replace(self.mark, "")
