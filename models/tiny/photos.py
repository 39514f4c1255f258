"""Gather free photographs for training: ``python -m mmserve.models.tiny.photos``.

Reads the Debian packages gnome-backgrounds, mate-backgrounds, lomiri-wallpapers, ukui-wallpapers and
plasma-workspace-wallpapers (Creative Commons, GPL and LGPL) and the cut-out photographs of
tuxpaint-stamps-default (GPL and public domain; see each package's copyright file), as many as are
installed. Only small crops are kept, in the work folder; none is shipped.
"""

import re
from pathlib import Path

import cv2
import numpy as np

from mmserve.models.tiny.sprites import SIDE, centred, work_dir

WALLPAPERS = (Path("/usr/share/backgrounds"), Path("/usr/share/wallpapers"))
STAMPS = Path("/usr/share/tuxpaint/stamps")
STAMP_KINDS = (
    "animals",
    "food",
    "household",
    "plants",
    "town/houses",
    "town/monuments",
    "vehicles",
    "hobbies",
)
CROP = 192


def gather_crops(limit: int = 1500) -> int:
    """Cut squares out of every wallpaper and store them; returns how many."""
    files = sorted(path for folder in WALLPAPERS for path in folder.rglob("*"))
    paths = _one_of_each(
        [path for path in files if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")]
    )
    rng = np.random.default_rng(7)
    crops: list[np.ndarray] = []
    for path in paths:
        image = cv2.imread(str(path), cv2.IMREAD_REDUCED_COLOR_2)
        if image is not None and min(image.shape[:2]) >= CROP:
            crops += _squares(rng, image[..., ::-1])
    return _store("photographs", [crops[i] for i in rng.permutation(len(crops))[:limit]])


def gather_cutouts() -> int:
    """Store the photographed things of the stamp collection as premultiplied RGBA; returns how many."""
    paths = sorted(path for kind in STAMP_KINDS for path in (STAMPS / kind).rglob("*.png"))
    cutouts = []
    for path in paths:
        image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        if "cartoon" in str(path) or image is None or image.ndim != 3 or image.shape[2] != 4:
            continue
        rgba = image[..., [2, 1, 0, 3]].copy()
        rgba[..., :3] = (rgba[..., :3].astype(np.uint16) * rgba[..., 3:] // 255).astype(np.uint8)
        cutouts.append(centred(rgba))
    return _store("cutouts", cutouts)


def _store(name: str, images: list[np.ndarray]) -> int:
    """Write the images as one array, so that a reader never meets half of it."""
    if images:
        draft = work_dir() / f"{name}.draft.npy"
        np.save(draft, np.stack(images))
        draft.replace(work_dir() / f"{name}.npy")
    return len(images)


def _one_of_each(paths: list[Path]) -> list[Path]:
    """Drop the other resolutions (files called WIDTHxHEIGHT) of a picture; the largest file stays."""
    chosen: dict[Path, Path] = {}
    for path in paths:
        key = path.parent if re.fullmatch(r"\d+x\d+", path.stem) else path
        if key not in chosen or path.stat().st_size > chosen[key].stat().st_size:
            chosen[key] = path
    return list(chosen.values())


def _squares(rng: np.random.Generator, image: np.ndarray) -> list[np.ndarray]:
    out = []
    for part in (1.0, 0.7, 0.7, 0.5, 0.5, 0.35, 0.35, 0.25, 0.25):
        side = max(CROP, int(min(image.shape[:2]) * part))
        if side > min(image.shape[:2]):
            continue
        top = int(rng.integers(image.shape[0] - side + 1))
        left = int(rng.integers(image.shape[1] - side + 1))
        cut = image[top : top + side, left : left + side]
        small = cv2.resize(cut, (CROP, CROP), interpolation=cv2.INTER_AREA)
        if small.std() > 12:
            out.append(small)
    return out


if __name__ == "__main__":
    print(gather_crops(), "crops,", gather_cutouts(), f"cut-outs of {SIDE} pixels in", work_dir())
