"""Which classes make up a family, and how a checkpoint becomes a model that can run."""

import importlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn

from mmserve.core.config import ModelOptions
from mmserve.core.errors import ConfigError, ModelLoadError
from mmserve.models.config import ModelConfig, read_config, read_normalization
from mmserve.models.forward import LanguageModel, VisionEncoder
from mmserve.models.hub import resolve
from mmserve.models.layers.base import Filling, Placement
from mmserve.models.ops.registry import choose_ops
from mmserve.models.weights import fill_dummy, load_weights

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """Classes as ``module:name``, imported when a model of the family is loaded (encoders build on this
    package, not the other way round), and where our parameter names differ from the checkpoint's."""

    language: str
    encoder: str
    renames: tuple[tuple[str, str], ...]


_QWEN2_MERGER = (
    ("visual.merger.norm.", "visual.merger.ln_q."),
    ("visual.merger.fc1.", "visual.merger.mlp.0."),
    ("visual.merger.fc2.", "visual.merger.mlp.2."),
)
_QWEN3_NAMES = (("visual.deepstack.", "visual.deepstack_merger_list."), (".fc", ".linear_fc"))

FAMILIES = {
    "qwen2_vl": Family("mmserve.models.qwen2:Qwen2", "mmserve.encoders.qwen2:Qwen2Vision", _QWEN2_MERGER),
    "qwen2_5_vl": Family(
        "mmserve.models.qwen2:Qwen2", "mmserve.encoders.qwen2_5:Qwen25Vision", _QWEN2_MERGER
    ),
    "qwen3_vl": Family("mmserve.models.qwen3:Qwen3", "mmserve.encoders.qwen3:Qwen3Vision", _QWEN3_NAMES),
}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model that can run. ``backends`` tells which form of each operation does."""

    config: ModelConfig
    language: LanguageModel
    encoder: VisionEncoder
    dtype: torch.dtype
    device: torch.device
    backends: dict[str, str]
    folder: Path
    num_parameters: int

    @property
    def vision_token_bytes(self) -> int:
        """What one vision token takes in the embedding pool."""
        return self.config.feature_rows * self.config.text.hidden_size * self.dtype.itemsize


def load_model(options: ModelOptions, *, linear_backend: str = "auto", seed: int = 0) -> LoadedModel:
    """Build the model that ``options`` names and fill it from its checkpoint, or with random weights of
    ``seed`` when the load format is dummy.

    ModelLoadError: no such model, an unsupported architecture, or files that do not fit. ConfigError:
    a device, ``linear_backend`` (auto, onednn, native, plain) or quantization that cannot run here.
    """
    started = time.monotonic()
    dummy = options.load_format == "dummy"
    folder = resolve(options.model, options.revision, weights=not dummy)
    config = read_config(folder)
    device = _device(options.device)
    dtype = _dtype(options.dtype, config.dtype)
    place = Placement(device, dtype, choose_ops(device, dtype, linear_backend, options.quantization))
    family = FAMILIES[config.family]
    language: nn.Module = _imported(family.language)(config, place)
    encoder: nn.Module = _imported(family.encoder)(
        config.vision, read_normalization(folder, config.family), place
    )
    filling = Filling({"language": language, "visual": encoder})
    count = sum(view.numel() for view in filling.views.values())
    if dummy:
        fill_dummy(filling.views, filling.filled, seed)
    else:
        tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
        load_weights(folder, filling.views, filling.filled, family.renames, optional=tied)
    filling.finish()
    log.info(
        "loaded %s: %s, %.1f M parameters in %s on %s, %.1f s",
        *(options.model, config.family, count / 1e6, dtype, device, time.monotonic() - started),
    )
    return LoadedModel(
        config=config,
        language=language.eval(),
        encoder=cast(VisionEncoder, encoder.eval()),
        dtype=dtype,
        device=device,
        backends=dict(place.ops.names),
        folder=folder,
        num_parameters=count,
    )


def _imported(path: str) -> type[nn.Module]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _device(wanted: str) -> torch.device:
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError("device cuda is not available on this machine; allowed: auto, cpu", param="device")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def _dtype(wanted: str, checkpoint: str | None) -> torch.dtype:
    """The dtype of weights and activations; ``auto`` is the checkpoint's, but never float16."""
    name = wanted if wanted != "auto" else checkpoint or "float32"
    if name not in _DTYPES:
        raise ModelLoadError(f"checkpoint dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}")
    if name == "float16":
        log.warning("the checkpoint is float16; it runs in bfloat16")
        return torch.bfloat16
    return _DTYPES[name]
