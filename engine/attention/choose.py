"""Which attention backend a configuration gets, and why. (``mmserve doctor`` shows the same.)"""

import logging
from collections.abc import Callable

import torch

from mmserve.core.errors import ConfigError
from mmserve.engine.attention.base import AttentionBackend
from mmserve.engine.attention.matmul import MatmulAttention
from mmserve.engine.attention.native import NativeAttention
from mmserve.engine.attention.reference import ReferenceAttention
from mmserve.engine.kv.pool import KVPool
from mmserve.models.ops.native import attention as native

log = logging.getLogger(__name__)

_BACKENDS: dict[str, Callable[[KVPool], AttentionBackend]] = {
    "native": NativeAttention,
    "torch": MatmulAttention,
    "reference": ReferenceAttention,
}


def attention_for(name: str, pool: KVPool) -> AttentionBackend:
    """The backend of ``attention_backend`` over ``pool``. ConfigError when it cannot run there."""
    chosen, why = choose_attention(name, pool.data.device, pool.shape.dtype)
    log.info("attention runs as %s: %s", chosen, why)
    return _BACKENDS[chosen](pool)


def choose_attention(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """(backend, why) of ``attention_backend`` ``name``; auto is the fastest that runs on ``device``.

    ConfigError when native is asked for and cannot run.
    """
    if name in ("torch", "reference"):
        return name, "asked for"
    reason = native.unusable(device, dtype)
    if name == "native":
        if reason is not None:
            raise ConfigError(f"attention_backend native cannot run: {reason}", param="attention_backend")
        return name, "asked for"
    if reason is None:
        return "native", "kernels in C++ read the KV pool where it lies"
    if device.type == "cpu":
        log.warning("attention runs slower than it could; native cannot run: %s", reason)
    return "torch", f"matrix products on views of the KV pool; native cannot run: {reason}"
