"""Text to token ids, with the caller's words kept apart from the template's."""

import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from mmserve.core.errors import ModelLoadError
from mmserve.preprocess.pieces import PieceCache
from mmserve.preprocess.spec import ProcessorSpec

PIECE_BYTES = 32 << 20

# Added tokens that steer the model. Others (<think>, <tool_call>, ...) are words that anyone may write.
_CONTROL = re.compile(r"<\|.*\|>", re.DOTALL)


class TextTokenizer:
    """The model's own tokenizer, and the same without its added tokens.

    Reserved are the added tokens that the tokenizer calls special, and all of the form ``<|...|>``. The
    pieces of a rendered template between added tokens are remembered (``pieces``).
    """

    def __init__(self, spec: ProcessorSpec, piece_bytes: int = PIECE_BYTES) -> None:
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
        self._separable = _separable(added.values(), spec.tokenizer_json)
        self.pieces = PieceCache(piece_bytes)
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
        if self._cuts is None or (marker.mark not in text and not self._separable):
            return self.encode(text)
        ids: list[int] = []
        for piece in self._cuts.split(text):
            if piece in self._added:
                ids.append(self._added[piece])
            elif piece:
                ids += self.pieces.get(marker.clean(piece), self.encode_literal)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._full.decode(list(ids), skip_special_tokens=skip_special_tokens))


def _separable(added: Iterable[AddedToken], tokenizer_json: str) -> bool:
    """Whether what stands between added tokens is tokenised as if it stood alone.

    So it is unless an added token takes spaces from its neighbours, is looked for in the normalised text or
    as a whole word only, or the tokenizer treats the beginning of the whole text in a way of its own.
    """
    if any(t.lstrip or t.rstrip or t.single_word or t.normalized for t in added):
        return False
    return re.search(r'"prepend_scheme"\s*:\s*"first"', tokenizer_json) is None


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
