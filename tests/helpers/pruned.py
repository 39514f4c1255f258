"""Prompts of ``qwen_pairs`` whose clips have lost cells, and what transformers makes of them."""

import numpy as np
import torch
from helpers.engine_requests import prepared
from helpers.qwen_pairs import IMAGE
from msgspec.structs import replace

from mmserve.core.digest import framed_digest
from mmserve.preprocess.layout import item_keys


def masks(pair, prompt, share, seed=0):
    """For each item of ``prompt`` the cells to keep: all of its stills' and of about every third other."""
    rng = np.random.default_rng(seed)
    return [
        None if token == IMAGE or rng.random() < 0.3 else some(cells(pair, grid), share, rng)
        for token, _, grid in prompt.items
    ]


def cells(pair, grid):
    return grid[0] * grid[1] // pair.vision.merge_size**2


def some(count, share, rng):
    chosen = rng.permutation(count)[: max(1, round(count * (1 - share)))]
    return np.sort(chosen).astype(np.int32)


def standing(pair, prompt, kept):
    """bool [N]: the tokens of the whole prompt that stay."""
    stays, rows = np.ones(len(prompt.ids), bool), iter(prompt.rows)
    for own, (_, _, grid) in zip(kept, prompt.items, strict=True):
        taken = [next(rows) for _ in range(cells(pair, grid))]
        if own is not None:
            stays[np.delete(taken, own)] = False
    return stays


def request_of(pair, prompt, kept, name="r", **fields):
    """``prompt`` without the cells that are not ``kept``, at the positions that it has with them."""
    whole = prepared(pair, prompt, name, **fields)
    stays = standing(pair, prompt, kept)
    keys, items = whole.radix_keys.copy(), []
    for step, (item, own) in enumerate(zip(whole.items, kept, strict=True)):
        start, stop = (int(stays[:at].sum()) for at in item.span)
        if own is not None:
            digest = framed_digest(item.digest, own.tobytes())
            kept_rows = np.flatnonzero(stays[slice(*item.span)]) + item.span[0]
            keys[kept_rows] = item_keys(digest, stop - start, step)
            item = replace(item, kept=own, digest=digest)
        items.append(replace(item, span=(start, stop)))
    return replace(
        whole,
        token_ids=whole.token_ids[stays],
        radix_keys=keys[stays],
        positions=np.ascontiguousarray(whole.positions[:, stays]),
        position_delta=len(stays) + whole.position_delta - int(stays.sum()),
        items=tuple(items),
    )


def greedy_reference(pair, prompt, kept, count):
    """``count`` greedy tokens by transformers alone: whole items are encoded, rows are taken out of what
    comes of them, and everything is computed anew for each token."""
    model = pair.reference.model
    stays = torch.from_numpy(standing(pair, prompt, kept))
    positions, delta = pair.positions(prompt)
    place = len(prompt.ids) + delta
    ids, positions = torch.tensor(prompt.ids)[stays], positions[:, stays]
    rows = torch.zeros(len(prompt.ids), dtype=torch.bool)
    rows[prompt.rows] = True
    visual = rows[stays]
    features, deep = _features(pair, prompt)
    own = stays[rows]
    features, deep = features[own], [level[own] for level in deep]
    said = []
    for _ in range(count):
        embeds = model.get_input_embeddings()(ids).clone()
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[: len(visual)] = visual
        embeds[mask] = features
        extra = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": deep} if deep else {}
        with torch.no_grad():
            out = model.language_model(
                inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False, **extra
            )
            token = pair.reference.lm_head(out.last_hidden_state[0, -1]).argmax()
        said.append(int(token))
        ids = torch.cat((ids, token[None]))
        positions = torch.cat((positions, torch.full((3, 1), place)), 1)
        place += 1
    return said


def _features(pair, prompt):
    """Of all items in their order: merged tokens [V, hidden], and those of each deepstack level."""
    merged, deep = [], []
    for _, pixels, grid in prompt.items:
        with torch.no_grad():
            out = pair.reference.model.visual(
                pair.plain_patches(pixels, grid), grid_thw=torch.tensor([[1, *grid]]), return_dict=True
            )
        merged.append(out.pooler_output)
        deep.append(getattr(out, "deepstack_features", None) or [])
    return torch.cat(merged), [torch.cat(level) for level in zip(*deep, strict=True)]
