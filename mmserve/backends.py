"""Which device, precision and forms of operations a configuration will run with on this machine, and why."""

from pathlib import Path
from typing import Any

import torch

from mmserve.core.config import BUNDLED_MODEL, Config
from mmserve.core.errors import ModelLoadError
from mmserve.encoders.attention import choose_form
from mmserve.encoders.graphs import choose_graphs
from mmserve.engine.attention.choose import choose_attention
from mmserve.engine.grammar.choose import choose_grammar
from mmserve.engine.runner.overlap import choose_overlap
from mmserve.engine.sampling.choose import choose_sampling
from mmserve.models.config import ModelConfig, read_config
from mmserve.models.hub import resolve
from mmserve.models.ops.registry import choose_ops, native_unusable, triton_unusable
from mmserve.preprocess.heif import EXTRA, has_heif

Choice = dict[str, Any]


def expected(config: Config) -> dict[str, Choice]:
    """``{part: {"runs": ..., "why": ...}}``, told without loading the model or reaching for the hub."""
    device, dtype = _device(config.model.device), _dtype(config)
    ops = choose_ops(
        *(torch.device(device["runs"]), getattr(torch, dtype["runs"])),
        *(config.runner.linear_backend, config.model.quantization),
    )
    names = dict(ops.names)
    linear = names.pop("linear")
    attention = _attention(config, device["runs"], dtype["runs"])
    return {
        "device": device,
        "dtype": dtype,
        "attention": attention,
        "vision attention": _vision_attention(config, device["runs"], dtype["runs"]),
        "graphs": _graphs(attention["runs"], device["runs"], config.runner.enforce_eager),
        "graphs of pictures": _picture_graphs(config, device["runs"]),
        "overlap": _overlap(config, device["runs"]),
        "linear": {"runs": linear, "why": ops.linear_why},
        "operations": {"runs": names, "why": _operations(device["runs"], dtype["runs"])},
        "sampling": _sampling(device["runs"]),
        "grammars": _grammars(config),
        "heic": _heic(),
        "preprocessing": _preprocessing(config.media.workers),
        "threads": {
            "runs": config.runner.threads or torch.get_num_threads(),
            "why": "asked for" if config.runner.threads else "torch's choice for this machine",
        },
    }


def _sampling(device: str) -> Choice:
    runs, why = choose_sampling(torch.device(device))
    return {"runs": runs, "why": why}


def _grammars(config: Config) -> Choice:
    runs, why = choose_grammar(config.runner.grammar_backend)
    return {"runs": runs, "why": why}


def _heic() -> Choice:
    if has_heif():
        return {"runs": "pillow-heif", "why": "it is installed"}
    return {"runs": "none", "why": f"{EXTRA} would bring it"}


def _preprocessing(workers: int) -> Choice:
    if workers:
        return {"runs": f"{workers} processes for media, 1 for prompts", "why": "as many as workers says"}
    return {"runs": "threads of the server", "why": "workers is 0"}


def _attention(config: Config, device: str, dtype: str) -> Choice:
    kept = _known(config)
    runs, why = choose_attention(
        *(config.runner.attention_backend, torch.device(device), getattr(torch, dtype)),
        *(() if kept is None else (kept.text.head_dim,)),
    )
    return {"runs": runs, "why": why}


def _picture_graphs(config: Config, device: str) -> Choice:
    runs, why = choose_graphs(torch.device(device), config.runner.enforce_eager)
    return {"runs": runs, "why": why}


def _overlap(config: Config, device: str) -> Choice:
    runs, why = choose_overlap(config.runner.overlap, torch.device(device))
    return {"runs": runs, "why": why}


def _graphs(attention: str, device: str, eager: bool) -> Choice:
    if eager:
        return {"runs": "none", "why": "enforce_eager is on"}
    if attention in ("flashinfer", "triton") and device == "cuda":
        return {"runs": "CUDA graphs", "why": "attention reads its plan from memory that stays"}
    if attention == "native":
        return {"runs": "recorded steps", "why": "attention reads its plan from memory that stays"}
    return {"runs": "none", "why": "attention walks its plan on the host, which no graph can record"}


def _vision_attention(config: Config, device: str, dtype: str) -> Choice:
    kept = _known(config)
    runs, why = choose_form(
        *(torch.device(device), getattr(torch, dtype)), *(() if kept is None else (kept.vision.head_dim,))
    )
    return {"runs": runs, "why": why}


def _operations(device: str, dtype: str) -> str:
    place = (torch.device(device), getattr(torch, dtype))
    if device == "cuda":
        reason = triton_unusable(*place)
        return "fused kernels in Triton" if reason is None else f"torch's own; Triton's cannot run: {reason}"
    reason = native_unusable(*place)
    if reason is None:
        return "kernels in C++, compiled for this CPU; in torch what has none"
    return f"the device's own form of each where there is one; native cannot run: {reason}"


def _device(wanted: str) -> Choice:
    seen = torch.cuda.is_available()
    if wanted == "cpu":
        return {"runs": "cpu", "why": "asked for"}
    if seen:
        return {"runs": "cuda", "why": "torch sees " + torch.cuda.get_device_name(0)}
    return {
        "runs": "cpu",
        "why": "torch sees no NVIDIA GPU" + (", though cuda is asked for" * (wanted == "cuda")),
    }


def _dtype(config: Config) -> Choice:
    if config.model.dtype != "auto":
        return {"runs": config.model.dtype, "why": "asked for"}
    kept = _known(config)
    if kept is None:
        return {"runs": "bfloat16", "why": "what most models have; the checkpoint decides when it is loaded"}
    if kept.dtype == "float16":
        return {"runs": "bfloat16", "why": "the checkpoint is float16, which is slow on a CPU"}
    return {"runs": kept.dtype or "float32", "why": "the checkpoint's own"}


def _known(config: Config) -> ModelConfig | None:
    """The model's own configuration, as far as this machine can tell it."""
    try:
        return on_this_machine(config)
    except ModelLoadError:
        return None


def on_this_machine(config: Config) -> ModelConfig | None:
    """The model's own configuration; None if only the hub could tell, ModelLoadError if it is wrong."""
    name = config.model.model
    local = name == BUNDLED_MODEL or Path(name).expanduser().exists()
    return read_config(resolve(name)) if local else None
