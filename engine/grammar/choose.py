"""Which library keeps answers to their forms. (``mmserve doctor`` shows the same.)"""

import importlib.util
from collections.abc import Sequence

from mmserve.core.errors import ConfigError
from mmserve.engine.grammar.base import GrammarBackend
from mmserve.engine.grammar.desk import GrammarDesk

EXTRA = "pip install 'triton==3.7.1' && pip install 'mmserve[xgrammar]'"


def desk_for(name: str, tokenizer_json: str, vocab: int, eos_ids: Sequence[int]) -> GrammarDesk:
    """The desk of ``grammar_backend``. ConfigError when its library is not installed.

    xgrammar is loaded here: it brings transformers, whose import would hold up answers if it came with the
    first grammar. llguidance waits for that: most models never see any.
    """
    library, _ = choose_grammar(name)
    if name == "guidance":
        return GrammarDesk(lambda: _guidance(tokenizer_json, vocab, eos_ids), library)
    backend = _xgrammar(tokenizer_json, vocab, eos_ids)
    return GrammarDesk(lambda: backend, library)


def choose_grammar(name: str) -> tuple[str, str]:
    """(library, why) of ``grammar_backend`` ``name``. ConfigError when it is not installed."""
    if name == "guidance":
        return "llguidance", "asked for, or nothing was"
    if importlib.util.find_spec("xgrammar") is None:
        raise ConfigError(
            f"grammar_backend xgrammar is not installed; this brings it: {EXTRA}", param="grammar_backend"
        )
    return "xgrammar", "asked for"


def _guidance(tokenizer_json: str, vocab: int, eos_ids: Sequence[int]) -> GrammarBackend:
    from mmserve.engine.grammar.guidance import GuidanceBackend

    return GuidanceBackend(tokenizer_json, vocab, eos_ids)


def _xgrammar(tokenizer_json: str, vocab: int, eos_ids: Sequence[int]) -> GrammarBackend:
    from mmserve.engine.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(tokenizer_json, vocab, eos_ids)
