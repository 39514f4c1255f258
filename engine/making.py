"""The parts of an engine, as a configuration and a model want them."""

import logging
from collections.abc import Callable

from mmserve.core.config import NO_BOUND, Config
from mmserve.core.device import FIRST, Device, Stream
from mmserve.core.errors import ConfigError
from mmserve.encoders.graphs import EncoderGraphs, choose_graphs
from mmserve.encoders.pool import EmbeddingPool
from mmserve.encoders.stage import EncoderStage
from mmserve.encoders.transformer import VisionTransformer
from mmserve.engine.attention.base import AttentionBackend, Extent
from mmserve.engine.attention.choose import attention_for
from mmserve.engine.kv.pool import KVPool, pages_in
from mmserve.engine.runner.devices import device_for
from mmserve.engine.runner.memory import Profile, pages_left, shape_of
from mmserve.engine.runner.overlap import Overlap, choose_overlap
from mmserve.engine.sampling.choose import bytes_at_most, choose_sampling
from mmserve.models.registry import LoadedModel

log = logging.getLogger(__name__)

ENCODER_TOKENS = {"cpu": 256, "cuda": 4096}  # a CPU gains nothing from larger batches, and others wait
STALL_FACTOR = {"cpu": 1.8, "cuda": None}  # the longest of 100 waits are half as long again
CPU_KV_MIB = 1024


def encoder_tokens(model: LoadedModel, config: Config) -> int:
    """Vision tokens of a batch of pictures."""
    return config.scheduler.encoder_tokens or ENCODER_TOKENS[model.device.type]


def stall_factor(model: LoadedModel, config: Config) -> float | None:
    """What ``Mixing`` bounds waits by. Where a GPU has no bound of its own, one that nothing reaches is none:
    beside one, pictures and prompts would take turns."""
    wanted = config.scheduler.stall_factor
    if wanted is None or (model.device.type != "cpu" and wanted >= NO_BOUND):
        return STALL_FACTOR[model.device.type]
    return wanted


def kv_pool(model: LoadedModel, config: Config, device: Device) -> KVPool:
    """Of the size that is asked for; else ``CPU_KV_MIB`` on a CPU, and on a GPU what is left of it."""
    shape, size, wanted = shape_of(model), config.cache.page_size, config.cache.kv_cache_mib
    if wanted is not None or device.synchronous:
        return KVPool(shape, pages_in(wanted or CPU_KV_MIB, shape, size), size, model.device)
    longest = config.model.max_model_len or model.config.max_position
    trial = device_for(model.device)
    profile = Profile(
        *(model, config, device, trial, lambda pool: attention_over(pool, model, config, longest)),
        *(encoder_tokens(model, config), encoder_graphs(model, config, trial)),
    )
    form, _ = choose_sampling(model.device)
    sampler = bytes_at_most(form, model.config.text.vocab_size, config.scheduler.max_running)
    return KVPool(shape, pages_left(profile.plan(sampler), shape, size), size, model.device)


def attention_over(pool: KVPool, model: LoadedModel, config: Config, max_len: int) -> AttentionBackend:
    """The backend of ``attention_backend`` for contexts of up to ``max_len`` tokens."""
    extent = Extent(model.config.text.num_heads, config.scheduler.max_running, max_len)
    return attention_for(config.runner.attention_backend, pool, extent)


def max_model_len(model: LoadedModel, config: Config, kv: KVPool) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return min(model.config.max_position, kv.tokens)
    if wanted > model.config.max_position:
        raise ConfigError(
            f"max_model_len is {wanted}; the model goes up to {model.config.max_position}",
            param="max_model_len",
        )
    if wanted > kv.tokens:
        raise ConfigError(
            f"max_model_len is {wanted}, but a KV pool of {kv.data.nbytes >> 20} MiB holds {kv.tokens}"
            " tokens: lower it or raise kv_cache_mib",
            param="max_model_len",
        )
    return wanted


def overlap_of(config: Config, device: Device, clock: Callable[[], float]) -> Overlap | None:
    chosen, why = choose_overlap(config.runner.overlap, device.torch_device)
    log.info("overlap of steps is %s: %s", chosen, why)
    return Overlap(device, config.scheduler.max_running, clock) if chosen == "on" else None


def main_stream(device: Device) -> Stream:
    """Where steps run, behind all that was done to make the engine."""
    stream, made = device.stream(FIRST), device.event()
    made.record(device.current())
    made.wait(stream)
    return stream


def encoder_graphs(model: LoadedModel, config: Config, device: Device) -> EncoderGraphs | None:
    """None where pictures are not captured; nothing is captured yet."""
    chosen, why = choose_graphs(device.torch_device, config.runner.enforce_eager)
    log.info("graphs of pictures: %s, %s", chosen, why)
    if chosen == "none" or not isinstance(model.encoder, VisionTransformer):
        return None
    return EncoderGraphs(model.encoder.deep, model.encoder.config, device, model.dtype)


def encoder_stage(model: LoadedModel, config: Config, device: Device) -> EncoderStage:
    return EncoderStage(
        model.encoder,
        encoder_tokens(model, config),
        EmbeddingPool(config.cache.encoder_cache_mib << 20),
        merge_size=model.config.vision.merge_size,
        token_bytes=model.vision_token_bytes,
        device=device,
        paced=stall_factor(model, config) is not None,
    )
