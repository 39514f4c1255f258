"""Which attention backend a configuration gets, and why. (``mmserve doctor`` shows the same.)"""

import logging
from collections.abc import Callable

import torch

from mmserve.core.errors import ConfigError
from mmserve.engine.attention.base import AttentionBackend, Extent
from mmserve.engine.attention.matmul import MatmulAttention
from mmserve.engine.attention.native import NativeAttention
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.pool import KVPool
from mmserve.models.ops import flashinfer
from mmserve.models.ops.native import attention as native
from mmserve.models.ops.triton import runtime as triton

log = logging.getLogger(__name__)

_PLAIN: dict[str, Callable[[KVPool], AttentionBackend]] = {
    "native": NativeAttention,
    "torch": MatmulAttention,
    "reference": ReferenceAttention,
}
# Those that auto takes if they run, the fastest first, and what makes them so. torch runs everywhere.
_FAST = {
    "native": "kernels in C++ read the KV pool where it lies",
    "flashinfer": "FlashInfer's kernels are made for this GPU",
    "triton": "Triton's kernels read the KV pool by its pages",
}


def attention_for(name: str, pool: KVPool, extent: Extent) -> AttentionBackend:
    """The backend of ``attention_backend`` over ``pool``, for plans of up to ``extent``. ConfigError when it
    cannot run there."""
    shape = pool.shape
    chosen, why = choose_attention(name, pool.data.device, shape.dtype, shape.head_dim)
    log.info("attention runs as %s: %s", chosen, why)
    if chosen in ("flashinfer", "triton"):
        return _on_gpu(chosen, pool, extent)
    return _PLAIN[chosen](pool)


def _on_gpu(chosen: str, pool: KVPool, extent: Extent) -> AttentionBackend:
    """Imported here, since they need packages that CPUs do without."""
    if chosen == "flashinfer":
        from mmserve.engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention(pool, extent)
    from mmserve.engine.attention.triton import TritonAttention

    return TritonAttention(pool, extent)


def choose_attention(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int = 128
) -> tuple[str, str]:
    """(backend, why) of ``attention_backend`` ``name``; auto is the fastest that runs on ``device``.

    ConfigError when one that cannot run is asked for.
    """
    if name in ("torch", "reference"):
        return name, "asked for"
    if name != "auto":
        reason = _unusable(name, device, dtype, head_dim)
        if reason is not None:
            raise ConfigError(f"attention_backend {name} cannot run: {reason}", param="attention_backend")
        return name, "asked for"
    missed: list[str] = []
    for fast in ("native",) if device.type == "cpu" else ("flashinfer", "triton"):
        reason = _unusable(fast, device, dtype, head_dim)
        if reason is None:
            return fast, "; ".join((_FAST[fast], *missed))
        missed.append(f"{fast} cannot run: {reason}")
    log.warning("attention runs slower than it could; %s", "; ".join(missed))
    return "torch", "; ".join(("matrix products on views of the KV pool", *missed))


def _unusable(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend ``name`` cannot run; None when it can."""
    if name == "native":
        return native.unusable(device, dtype)
    if name == "flashinfer":
        return flashinfer.unusable(device, dtype, head_dim)
    return triton.unusable(device)
