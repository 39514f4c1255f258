"""Words that must not come in an answer, as the tokens that would write them."""

from collections.abc import Iterable

from mmserve.preprocess.tokenizer import TextTokenizer


def spelled(words: Iterable[str], text: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word as it begins a text and as it follows a space; not those of other ways to split
    it, which a model seldom takes. The name of a special token is that token."""
    forms = (form for word in words for form in _forms(word))
    return tuple(dict.fromkeys(tuple(text.encode(form)) for form in forms))


def _forms(word: str) -> tuple[str, ...]:
    bare = word.lstrip()
    return (bare, f" {bare}") if bare else (word,)
