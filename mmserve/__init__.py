"""A multimodal inference service: pictures, video and live camera streams go in, text streams out."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmserve.core.messages import SamplingParams as SamplingParams
    from mmserve.llm import LLM as LLM

__version__ = "0.1.0"

_HOMES = {"LLM": "mmserve.llm", "SamplingParams": "mmserve.core.messages"}


def __getattr__(name: str) -> Any:
    """The offline API, imported when it is asked for: ``import mmserve`` alone needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'mmserve' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
