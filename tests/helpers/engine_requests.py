"""Prompts of ``qwen_pairs`` as the engine takes them, and an engine run to its end."""

import numpy as np

from mmserve.core.config import Config
from mmserve.core.digest import framed_digest
from mmserve.core.messages import PreparedRequest, SamplingParams, VisionItem
from mmserve.engine.engine import Engine
from mmserve.preprocess.layout import item_keys


def make_engine(pair, **options):
    """An engine over the pair's model, with a small pool; ``options`` are any of the configuration's."""
    return Engine(pair.model, Config.of(**{"kv_cache_mib": 4, "threads": 2, **options}), eos_ids=())


def prepared(pair, prompt, name="r", priority=0, **sampling):
    """A ``Prompt`` as a request; greedy and 12 tokens long if ``sampling`` does not say otherwise."""
    ids = np.array(prompt.ids, dtype=np.int32)
    positions, delta = pair.positions(prompt)
    items = tuple(vision_items(pair, prompt))
    keys = ids.astype(np.int64)
    for step, item in enumerate(items):
        start, stop = item.span
        keys[start:stop] = item_keys(item.digest, stop - start, step)
    return PreparedRequest(
        request_id=name,
        token_ids=ids,
        radix_keys=keys,
        positions=positions.numpy().astype(np.int32),
        position_delta=delta,
        items=items,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling}),
        priority=priority,
    )


def vision_items(pair, prompt):
    rows = iter(prompt.rows)
    for _, pixels, grid in prompt.items:
        taken = [next(rows) for _ in range(grid[0] * grid[1] // pair.vision.merge_size**2)]
        array = pixels.numpy()
        yield VisionItem(
            digest=framed_digest(array.tobytes(), repr(array.shape)),
            kind="image" if len(array) == 1 else "video",
            grid=grid,
            span=(taken[0], taken[-1] + 1),
            pixels=array,
        )


def drain(engine, most=3000):
    """Step until nothing is left; the outputs of each request, and its tokens."""
    outputs = {}
    for _ in range(most):
        if not engine.has_work:
            break
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_work, "something never finished"
    engine.check_integrity()
    stats = engine.stats()
    assert stats["kv_pages_free"] + stats["kv_pages_cached"] == stats["kv_pages"]
    return outputs


def tokens(outputs):
    return [token for output in outputs for token in output.token_ids]


def generate(pair, prompts, max_tokens=12, **options):
    """Tokens of each prompt, all submitted at once to a fresh engine."""
    engine = make_engine(pair, **options)
    for i, prompt in enumerate(prompts):
        engine.submit(prepared(pair, prompt, str(i), max_tokens=max_tokens))
    outputs = drain(engine)
    return [tokens(outputs[str(i)]) for i in range(len(prompts))]
