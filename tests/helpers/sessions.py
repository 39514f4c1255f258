"""A live session's context as the engine sees it: warm trunks, what is kept of one, what must be said."""

import numpy as np
import torch
from helpers.dense_attention import DenseAttention
from helpers.equal_models import TOP, Said
from msgspec.structs import replace

from mmserve.core.messages import CarryOver, SamplingParams
from mmserve.models.forward import ForwardInput, VisionRows

NEW = "a session's own"


def trunk(request, stop, name="trunk"):
    """The first ``stop`` tokens of ``request``, which end no item in its middle, to be kept warm."""
    return replace(
        request,
        request_id=name,
        token_ids=request.token_ids[:stop],
        radix_keys=request.radix_keys[:stop],
        positions=request.positions[:, :stop],
        items=tuple(item for item in request.items if item.span[1] <= stop),
        sampling=SamplingParams(),
        warm=True,
    )


def stages(request):
    """Where the trunk stood each time when it had grown by an item, and before the last words."""
    return [*(item.span[1] for item in request.items), max(request.num_tokens - 2, 1)]


def moved(request, distance):
    """``request`` at positions higher by ``distance``."""
    return replace(
        request,
        positions=request.positions + distance,
        position_delta=request.position_delta + distance,
    )


def places(order):
    return np.concatenate([np.arange(a, b) for a, b in order.kept])


def end_of(turns):
    """What a generator returns when it has been left to run."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def carried_over(engine, order):
    """The whole of ``order``, with no step in between."""
    return end_of(engine.carry_over(order))


def after(request, order, name="after"):
    """``request`` when of its trunk what ``order`` keeps is left, and all that stood behind the trunk."""
    kept = np.concatenate((places(order), np.arange(len(order.keys), request.num_tokens)))
    positions = request.positions[:, kept].copy()
    positions[:, sum(b - a for a, b in order.kept[: order.head]) :] -= order.shift
    new = {int(old): place for place, old in enumerate(kept)}
    items = tuple(
        replace(item, span=(new[item.span[0]], new[item.span[1] - 1] + 1))
        for item in request.items
        if item.span[0] in new
    )
    gone = request.num_tokens - len(kept)
    return replace(
        request,
        request_id=name,
        token_ids=request.token_ids[kept],
        radix_keys=request.radix_keys[kept],
        positions=positions,
        position_delta=request.position_delta + gone - order.shift,
        items=items,
        cache_salt=order.new_salt,
    )


def order_of(request, stop, *kept, **fields):
    """Of the trunk that is ``stop`` tokens of ``request``, ``kept`` ranges go on."""
    return CarryOver(keys=request.radix_keys[:stop], kept=kept, **{"new_salt": NEW, **fields})


class Oracle:
    """Plain attention over keys and values that are kept, dropped and turned as tensors, without pages."""

    def __init__(self, model):
        self.model = model
        self.attention = DenseAttention([0])

    def compute(self, request, start, stop):
        """Tokens [start, stop) of ``request``, behind those that are kept; the last one's logits."""
        items = [item for item in request.items if start < item.span[1] and item.span[0] < stop]
        vision = None
        if items:
            pixels = [torch.from_numpy(np.ascontiguousarray(item.pixels)) for item in items]
            features = self.model.encoder.forward(pixels, [item.grid for item in items])
            spans = [(item.span[0], max(item.span[0], start), min(item.span[1], stop)) for item in items]
            rows = [torch.arange(a - start, b - start) for _, a, b in spans]
            parts = [f[a - first : b - first] for f, (first, a, b) in zip(features, spans, strict=True)]
            vision = VisionRows(torch.cat(rows), torch.cat(parts))
        ids = torch.from_numpy(request.token_ids[start:stop].astype(np.int64))
        positions = torch.from_numpy(request.positions[:, start:stop].astype(np.int64))
        return self._forward(ids, positions, vision)

    def keep(self, kept, first=0, shift=0):
        """Of all tokens so far ``kept`` are left; keys from number ``first`` on move back by ``shift``."""
        kept = torch.from_numpy(kept)
        for place, (keys, values) in self.attention.cache.items():
            keys = keys[kept].clone()
            keys[first:] = self._turned(keys[first:], -shift)
            self.attention.cache[place] = keys, values[kept]

    def answer(self, request, start, count):
        """What is said to ``request``, whose first ``start`` tokens are what is kept."""
        logits = self.compute(request, start, request.num_tokens)
        tokens, told = [], []
        for number in range(count):
            logprobs = logits.float().log_softmax(-1)
            tokens.append(int(logprobs.argmax()))
            told += logprobs.topk(TOP).values.tolist()
            place = request.num_tokens + number + request.position_delta
            logits = self._forward(torch.tensor([tokens[-1]]), torch.full((3, 1), place), None)
        return Said(tokens, told)

    def _forward(self, ids, positions, vision):
        self.attention.step([len(ids)])
        last = torch.tensor([len(ids) - 1])
        inputs = ForwardInput(ids, positions, last, self.attention, vision)
        with torch.inference_mode():
            return self.model.language.forward(inputs)[0]

    def _turned(self, keys, by):
        """Keys [T, heads, dim] as numbers of the complex plane, turned by so many positions."""
        width = keys.shape[-1] // 2
        theta = self.model.config.text.rope_theta
        angles = by * theta ** (-torch.arange(width, dtype=torch.float64) / width)
        turned = torch.complex(keys[..., :width].double(), keys[..., width:].double()) * torch.exp(
            1j * angles
        )
        return torch.cat((turned.real, turned.imag), -1).to(keys.dtype)
