"""From a configuration to an engine that is ready to step, in whatever process it is to run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmserve.core.config import Config
from mmserve.engine.grammar.choose import choose_grammar, desk_for

if TYPE_CHECKING:
    from mmserve.engine.engine import Engine


def load_engine(config: Config, eos_ids: Sequence[int], tokenizer_json: str) -> "Engine":
    """The engine over the model of ``config``. ModelLoadError or ConfigError say what is wrong."""
    import torch

    from mmserve.engine.engine import Engine
    from mmserve.models.registry import load_model

    if config.runner.threads:
        torch.set_num_threads(config.runner.threads)
    choose_grammar(config.runner.grammar_backend)  # before a model is loaded in vain
    model = load_model(config.model, linear_backend=config.runner.linear_backend)
    grammars = desk_for(config.runner.grammar_backend, tokenizer_json, model.config.text.vocab_size, eos_ids)
    return Engine(model, config, eos_ids, grammars)


def told_of(engine: "Engine") -> tuple[str, ...]:
    """What the log says of an engine that was loaded."""
    forms = ", ".join(f"{op} {form}" for op, form in engine.model.backends.items())
    if engine.grammars is not None:
        forms += f", grammars {engine.grammars.library}"
    return (f"a prompt and its answer may have {engine.max_model_len} tokens", f"backends: {forms}")
