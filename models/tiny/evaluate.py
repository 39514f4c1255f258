"""Judging tiny-vl's answers, and the held-out set that training looks at now and then."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch

from mmserve.models.tiny import world
from mmserve.models.tiny.batches import Batch, Layout, collate, patchify
from mmserve.models.tiny.example import Example, Turn
from mmserve.models.tiny.net import TinyVL

Result = tuple[str, bool]  # task, right


def judge(turn: Turn, text: str) -> bool:
    """Word for word; placards and confessions of not knowing by their facts."""
    return world.facts_hold(turn, text)


def table(results: Iterable[Result]) -> str:
    """Right answers per task, as aligned lines of text."""
    counts: dict[str, list[bool]] = defaultdict(list)
    for task, right in results:
        counts[task].append(right)
    lines = [
        f"{task:<16} {100 * sum(rights) / len(rights):5.1f} %  of {len(rights)}"
        for task, rights in sorted(counts.items())
    ]
    everything = [right for rights in counts.values() for right in rights]
    lines.append(
        f"{'all':<16} {100 * sum(everything) / max(1, len(everything)):5.1f} %  of {len(everything)}"
    )
    return "\n".join(lines)


def held_out(layout: Layout, strength: float, per_kind: int = 48) -> list[Batch]:
    """Batches of single questions about 128 x 128 pictures that training never sees, a kind each."""
    batches = []
    for number, kind in enumerate(("scene", "count", "word", "clip", "unknown")):
        rng = world.stream("valid", number, int(100 * strength))
        examples: list[Example] = []
        while len(examples) < per_kind:
            example = world.sample_example(rng, (128, 128), kind, strength, max_turns=5)
            if (len(example.frames) > 1) == (kind == "clip"):
                examples.append(example)
        rows = [layout.row([(e, [t])], (i,)) for i, e in enumerate(examples) for t in e.turns]
        batches.append(collate(rows, [patchify(e.frames) for e in examples], (8, 8), groups=4))
    return batches


@torch.no_grad()
def score(net: TinyVL, batches: Sequence[Batch]) -> list[Result]:
    """Word-for-word results by teacher forcing: an answer is right when each next token is the likeliest
    given the right ones before it, which is exactly when greedy decoding would give the whole of it."""
    results = []
    for batch in batches:
        best = net(batch.patches, batch.grid, batch.groups).argmax(-1)
        same = (best == batch.targets).tolist()
        results += [(turn.task, all(same[first:last])) for turn, first, last in batch.marks]
    return results
