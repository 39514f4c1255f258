"""Sampling as the makers of a model advise it, for whoever does not say otherwise."""

from collections.abc import Mapping
from typing import Any

from mmserve.core.messages import SamplingParams
from mmserve.preprocess.spec import SAMPLING_FIELDS


def advised(advice: Mapping[str, Any], **wanted: Any) -> SamplingParams:
    """What is ``wanted``, by the fields of ``SamplingParams`` (None: nobody said), else the ``advice`` of the
    model's own generation settings, else OpenAI's defaults. A negative ``top_k`` is none."""
    fields = {name: advice[name] for name in SAMPLING_FIELDS if advice.get(name) is not None}
    fields |= {name: value for name, value in wanted.items() if value is not None}
    fields["top_k"] = max(0, int(fields.get("top_k", 0)))
    return SamplingParams(**fields)
