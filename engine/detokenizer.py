"""Token ids to text as they come: whole characters only, and never a part of a stop string."""

import codecs
import json
from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer

from mmserve.core.errors import ModelLoadError


class TokenBytes:
    """The bytes each token stands for, of a byte-level BPE tokenizer (all of Qwen's are).

    Such a tokenizer decodes by joining bytes, so any split of a token sequence decodes alike.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        tree = json.loads(tokenizer.to_str())
        if (tree.get("decoder") or {}).get("type") != "ByteLevel":
            raise ModelLoadError("tokenizer.json: only tokenizers with a ByteLevel decoder are supported")
        self._tokenizer = tokenizer
        self._added = {t["id"]: t["content"] for t in tree["added_tokens"]}
        self._special = {t["id"] for t in tree["added_tokens"] if t["special"]}
        self._known: dict[int, bytes] = {}

    @classmethod
    def from_json(cls, tokenizer_json: str) -> "TokenBytes":
        """From the text of a tokenizer.json."""
        return cls(Tokenizer.from_str(tokenizer_json))

    def text(self, token: int) -> bytes:
        """What ``token`` adds to the text: nothing for a special token or an id without a name."""
        return b"" if token in self._special else self.raw(token)

    def raw(self, token: int) -> bytes:
        """The bytes of ``token``, also of a special one."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._spelled(token)
        return known

    def _spelled(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token)
        return b"" if name is None else bytes(_byte_of_character()[c] for c in name)


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the others for characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class Detokenizer:
    """One answer in the making.

        text so far:  |-- given out --|-- held back: may be the start of a stop string --|

    ``add`` returns new text that is final; ``flush`` the rest. After ``stopped`` nothing follows: the
    text ends before the stop string that came first, or behind it if it is ``with_stop``. ``with_special``
    shows special tokens too.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        with_stop: bool = False,
        with_special: bool = False,
    ) -> None:
        self.stopped = False
        self.num_tokens = 0
        self._stop = [s for s in stop if s]
        self._min_tokens = min_tokens
        self._with_stop = with_stop
        self._bytes = tokens.raw if with_special else tokens.text
        self._held = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Text that ``token`` makes final; stop strings count once ``min_tokens`` tokens have come."""
        if self.stopped:
            return ""
        self.num_tokens += 1
        self._held += self._utf8.decode(self._bytes(token))
        if self.num_tokens <= self._min_tokens:
            return self._give(len(self._held))
        return self._up_to_stop() if self._find_stop() is not None else self._give(self._safe_length())

    def flush(self) -> str:
        """The end of the text; bytes of an unfinished character become U+FFFD."""
        if self.stopped:
            return ""
        self._held += self._utf8.decode(b"", final=True)
        if self.num_tokens > self._min_tokens and self._find_stop() is not None:
            return self._up_to_stop()
        return self._give(len(self._held))

    def _find_stop(self) -> tuple[int, int] | None:
        """Where the stop string that comes first begins, and its length."""
        return min(((at, len(s)) for s in self._stop if (at := self._held.find(s)) >= 0), default=None)

    def _up_to_stop(self) -> str:
        found = self._find_stop()
        assert found is not None
        self.stopped = True
        return self._give(found[0] + (found[1] if self._with_stop else 0))

    def _give(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text

    def _safe_length(self) -> int:
        """Up to where no stop string can begin any more."""
        held = self._held
        longest = max((len(s) for s in self._stop), default=1) - 1
        for start in range(max(len(held) - longest, 0), len(held)):
            if any(s.startswith(held[start:]) for s in self._stop):
                return start
        return len(held)
