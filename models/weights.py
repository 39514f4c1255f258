"""From safetensors files into a model's parameters, tensor by tensor; or random weights of the same shape."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from mmserve.core.errors import ModelLoadError
from mmserve.models.config import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN = 5

# Where the parts stand in a checkpoint: as in Qwen3-VL (and some later saves of Qwen2-VL), and as Qwen2-VL
# and Qwen2.5-VL were published.
LAYOUTS = (
    {"language.lm_head.": "lm_head.", "language.": "model.language_model.", "visual.": "model.visual."},
    {"language.lm_head.": "lm_head.", "language.": "model.", "visual.": "visual."},
)
_FLOATS = {"F64", "F32", "F16", "BF16"}
_DUMMY_BLOCK = (1 << 20) - 3  # a prime, so that no tensor repeats with the period of its rows


def load_weights(
    folder: Path,
    targets: Mapping[str, torch.Tensor],
    filled: Callable[[str], None],
    renames: Iterable[tuple[str, str]] = (),
    optional: Iterable[str] = (),
) -> None:
    """Copy every tensor of the checkpoint in ``folder`` into the view that ``targets`` gives for it, and tell
    ``filled`` its name, after which the view is nobody's here.

    Keys of ``targets`` are the models' own names; ``renames`` are the family's (ours, checkpoint's)
    parts of names. ``optional`` tensors of the checkpoint are passed over. All names and shapes are
    checked before anything is read. ModelLoadError names what is missing, unexpected, of a wrong shape
    or unreadable.
    """
    files = shard_map(folder)
    names = checkpoint_names(targets, files, tuple(renames))
    _check_names(names.keys(), files.keys(), set(optional))
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(files[name], []).append(name)
    for path, wanted in by_file.items():
        _check_shapes(path, {name: targets[names[name]].shape for name in wanted})
    for path, wanted in by_file.items():
        for name, tensor in _tensors(path, wanted):
            targets[names[name]].copy_(tensor)
            filled(names[name])


def shard_map(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the single file or from the index of a sharded checkpoint."""
    if (folder / SINGLE).is_file():
        return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise ModelLoadError(f"{folder} has neither {SINGLE} nor {INDEX}")
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{folder / INDEX} has no weight_map")
    shards = {shard: folder / shard for shard in weight_map.values()}
    absent = sorted(shard for shard, path in shards.items() if not path.is_file())
    if absent:
        raise ModelLoadError(f"{folder} lacks {_some(absent, 'shard')} that its index names")
    held = {shard: set(_names(path)) for shard, path in shards.items()}
    lost = sorted(name for name, shard in weight_map.items() if name not in held[shard])
    if lost:
        raise ModelLoadError(f"shards of {folder} lack {_some(lost, 'tensor')} that the index places in them")
    return {name: shards[shard] for name, shard in weight_map.items()}


def checkpoint_names(
    ours: Iterable[str], found: Iterable[str], renames: tuple[tuple[str, str], ...]
) -> dict[str, str]:
    """Checkpoint name -> our name, in the layout that the checkpoint's names ``found`` follow."""
    new = any(name.startswith("model.language_model.") for name in found)
    layout = LAYOUTS[0] if new else LAYOUTS[1]
    return {_checkpoint_name(name, layout, renames): name for name in ours}


def fill_dummy(targets: Mapping[str, torch.Tensor], filled: Callable[[str], None], seed: int = 0) -> None:
    """Random weights: normal with deviation 0.02, norms 1. Equal for equal seeds; memory speed, since each
    tensor is cut from one block of random numbers at a place that its name gives. ``filled`` as above."""
    block = torch.randn(_DUMMY_BLOCK, generator=torch.Generator().manual_seed(seed)) * 0.02
    blocks: dict[torch.dtype, torch.Tensor] = {}
    for name in list(targets):
        _fill(targets[name], name, block, blocks)
        filled(name)


def _fill(
    view: torch.Tensor, name: str, block: torch.Tensor, blocks: dict[torch.dtype, torch.Tensor]
) -> None:
    if view.dim() == 1 and name.endswith("weight"):
        view.fill_(1.0)
        return
    source = blocks.setdefault(view.dtype, block.to(view.dtype))
    _tile(view.view(-1), source, int.from_bytes(hashlib.blake2b(name.encode()).digest()[:4], "little"))


def _tile(target: torch.Tensor, source: torch.Tensor, start: int) -> None:
    start %= len(source)
    done = 0
    while done < len(target):
        part = source[start : start + len(target) - done]
        target[done : done + len(part)] = part
        done, start = done + len(part), 0


def _checkpoint_name(name: str, layout: Mapping[str, str], renames: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in renames:
        name = name.replace(ours, theirs)
    ours = next(prefix for prefix in layout if name.startswith(prefix))
    return layout[ours] + name.removeprefix(ours)


def _check_names(wanted: Iterable[str], found: Iterable[str], optional: set[str]) -> None:
    wanted, found = set(wanted), set(found)
    missing = sorted(wanted - found)
    unexpected = sorted(
        n for n in found - wanted - optional if not n.endswith("rotary_emb.inv_freq")
    )  # an old buffer that is computed
    problems = []
    if missing:
        problems.append(f"lacks {_some(missing, 'tensor')}")
    if unexpected:
        problems.append(f"has {_some(unexpected, 'unexpected tensor')}")
    if problems:
        raise ModelLoadError("the checkpoint " + " and ".join(problems))


def _check_shapes(path: Path, wanted: Mapping[str, torch.Size]) -> None:
    wrong = []
    with _open(path) as file:
        for name, due in wanted.items():
            header = file.get_slice(name)
            shape, kind = tuple(header.get_shape()), header.get_dtype()
            if shape != tuple(due):
                wrong.append(f"{name} is {list(shape)}, config.json makes it {list(due)}")
            elif kind not in _FLOATS:
                wrong.append(f"{name} is of type {kind}, which is not supported")
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ModelLoadError(f"tensors of {path.name} do not fit: {'; '.join(wrong[:SHOWN])}{more}")


def _tensors(path: Path, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    with _open(path) as file:
        for name in names:
            try:
                tensor = file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ModelLoadError(f"cannot read tensor {name} of {path}: {error}") from None
            yield name, tensor


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from None


def _some(names: list[str], what: str) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} {what}{'s' if len(names) > 1 else ''} ({', '.join(names[:SHOWN])}{more})"
