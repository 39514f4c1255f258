"""The counted work is what a forward really does, as torch's own counter sees it."""

import pytest
import torch
from helpers.qwen_pairs import Pair
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mmserve.bench import flops
from mmserve.models.forward import ForwardInput
from mmserve.models.ops.registry import reference_ops

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl-untied-bias"]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """In its plain torch form, since a counter sees nothing of what a kernel of ours does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmserve.models.registry.choose_ops", lambda *_, **__: reference_ops())
        patch.setattr("mmserve.encoders.attention.choose_form", lambda *_: ("fused", "it is counted"))
        yield Pair(request.param, tmp_path_factory.mktemp("model")).model


def counted(work):
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        work()
    return counter.get_total_flops()


class NoAttention:
    """Leaves the linear layers alone with the counter."""

    def forward(self, q, k, v, layer):
        return torch.zeros_like(q)


class MaskedAttention:
    """Every query meets every key, which is what a causal one meets and as much again, but for its own."""

    def forward(self, q, k, v, layer):
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
        return ((q @ k.transpose(1, 2)).softmax(-1) @ v).transpose(0, 1)


def forward(model, tokens, attention):
    ids, rows = torch.zeros(tokens, dtype=torch.long), torch.tensor([tokens - 1])
    model.language.forward(ForwardInput(ids, torch.zeros(3, tokens, dtype=torch.long), rows, attention))


@pytest.mark.parametrize("grid", [(4, 4), (10, 18), (2, 6)])
@pytest.mark.parametrize("frames", [1, 2])
def test_the_encoder_of_every_family(model, grid, frames):
    patch = model.config.vision.patch_size
    pixels = torch.zeros(frames, grid[0] * patch, grid[1] * patch, 3, dtype=torch.uint8)
    done = counted(lambda: model.encoder.forward([pixels], [grid]))
    assert flops.encoder_flops(model.config, [grid], frames) == done


def test_pictures_add_up(model):
    assert flops.encoder_flops(model.config, [(4, 4), (4, 4), (2, 6)]) == sum(
        flops.encoder_flops(model.config, [grid]) for grid in [(4, 4), (4, 4), (2, 6)]
    )


def test_the_linear_layers_of_a_prompt(model):
    text, tokens = model.config.text, 9
    linear = flops.prefill_flops(model.config, tokens) - flops.attention_flops(text, 0, tokens)
    assert linear == counted(lambda: forward(model, tokens, NoAttention()))


def test_causal_attention_meets_half_of_all_pairs_and_the_diagonal(model):
    tokens = 9
    whole = counted(lambda: forward(model, tokens, MaskedAttention()))
    whole -= counted(lambda: forward(model, tokens, NoAttention()))
    assert flops.attention_flops(model.config.text, 0, tokens) == whole * (tokens + 1) / (2 * tokens)


def test_a_prompt_in_parts_is_as_much_as_the_whole(model):
    """But for the row whose logits are wanted, of which each part has its own."""
    text, config = model.config.text, model.config
    parts = flops.prefill_flops(config, 20) + flops.prefill_flops(config, 50, cached=20)
    assert parts == flops.prefill_flops(config, 50) + 2 * flops.sampled_weights(text)
    assert flops.decode_flops(config, 50, 3) == sum(flops.decode_flops(config, 50 + n) for n in range(3))


def test_a_decode_step_reads_every_packed_matrix_once(model):
    text = model.config.text
    packed = [layer.packed for layer in model.language.modules() if hasattr(layer, "packed")]
    assert flops.weight_bytes(model.config, 4) == sum(p.nbytes for p in packed)
    assert flops.kv_bytes(model.config, 4) == 4 * text.num_layers * 2 * text.num_kv_heads * text.head_dim
