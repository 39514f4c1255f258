"""The held-out evaluation set that ships with the package: reading and writing it.

``evalset.jsonl`` has one picture or clip a line: ``file`` (a JPEG; a clip's frames side by side),
``frames``, ``fps``, ``kind``, ``condition`` (clean, bad or photo) and ``turns`` (task, question, answer,
facts). The "bad" rows are the "clean" rows after a bad camera, with the same questions.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np

from mmserve.models.tiny.example import Example, Turn

FOLDER = Path(__file__).parent / "evalset"
INDEX = "evalset.jsonl"
CONDITIONS = ("clean", "bad", "photo")


def read_evalset(folder: Path = FOLDER) -> Iterator[tuple[str, Example]]:
    """(condition, example) of every row, in the order of the file."""
    for line in (folder / INDEX).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        strip = cv2.imread(str(folder / row["file"]), cv2.IMREAD_COLOR)
        if strip is None:
            raise FileNotFoundError(f"evaluation picture {row['file']} is missing in {folder}")
        frames = np.stack(np.split(strip[..., ::-1], row["frames"], axis=1))
        turns = tuple(Turn(**turn) for turn in row["turns"])
        yield row["condition"], Example(frames, turns, row["kind"], row["fps"])


def write_row(folder: Path, name: str, condition: str, example: Example, quality: int = 92) -> dict:
    """Write one example's pixels as a JPEG and return its line of the index."""
    strip = np.concatenate(list(example.frames), axis=1)
    cv2.imwrite(str(folder / f"{name}.jpg"), strip[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    turns = [
        {"task": turn.task, "question": turn.question, "answer": turn.answer, "facts": turn.facts}
        for turn in example.turns
    ]
    return {
        "file": f"{name}.jpg",
        "condition": condition,
        "kind": example.kind,
        "frames": len(example.frames),
        "fps": example.fps,
        "turns": turns,
    }


def write_index(folder: Path, rows: list[dict]) -> None:
    """Write the index, a line for each row."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (folder / INDEX).write_text("\n".join(lines) + "\n", encoding="utf-8")
