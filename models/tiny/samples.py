"""Write the files that ship with tiny-vl: ``python -m mmserve.models.tiny.samples --photos FOLDER``.

``samples/`` holds a few pictures and a clip with their true captions, ``evalset/`` the held-out evaluation
set. FOLDER holds the photographs of PHOTOS, which training never sees: unpack them from the wheels of
scikit-image, scikit-learn and matplotlib. Without them the rows of condition "photo" are left out.
"""

import argparse
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import av
import cv2
import numpy as np

from mmserve.models.tiny import evalset
from mmserve.models.tiny.captions import caption, unknown_sentence
from mmserve.models.tiny.degrade import plan, shoot
from mmserve.models.tiny.draw import draw_scene
from mmserve.models.tiny.example import Example, Turn
from mmserve.models.tiny.palette import main_colours
from mmserve.models.tiny.questions import ASKERS, ask_unknown
from mmserve.models.tiny.sampler import photograph, stream
from mmserve.models.tiny.scene import CORNERS, Item, Motion, Scene, compose
from mmserve.models.tiny.sprites import word_fonts
from mmserve.models.tiny.subjects import Noun, things

SAMPLES = Path(__file__).parent / "samples"
BAD_JPEG = 30
# (kind, how many, sizes as (height, width)) of the drawn part of the evaluation set.
DRAWN = (
    ("scene", 74, ((128, 128), (160, 160), (128, 192), (192, 128), (96, 96), (160, 224))),
    ("count", 46, ((128, 128), (160, 160), (128, 192), (192, 128))),
    ("word", 46, ((128, 128), (128, 160), (160, 160), (96, 160))),
    ("clip", 46, ((96, 96), (96, 128), (128, 96), (112, 112))),
)
STILL_TASKS = ("caption", "what", "colour", "count", "where", "read", "yesno", "absent", "placard")
CLIP_TASKS = ("caption", "motion", "what", "yesno")
PHOTOS = {
    "astronaut.png": "NASA, public domain (scikit-image)",
    "brick.png": "CC0 textures, CC0 (scikit-image)",
    "camera.png": "Lav Varshney, CC0 (scikit-image)",
    "chelsea.png": "Stefan van der Walt, CC0 (scikit-image)",
    "china.jpg": "danielbuechele, flickr.com/photos/danielbuechele/6061409035, CC BY 2.0 (scikit-learn)",
    "clock_motion.png": "Stefan van der Walt, public domain (scikit-image)",
    "coffee.png": "Rachel Michetti, CC0 (scikit-image)",
    "coins.png": "Brooklyn Museum, no known copyright restrictions (scikit-image)",
    "flower.jpg": "vultilion, flickr.com/photos/vultilion/6056698931, CC BY 2.0 (scikit-learn)",
    "grace_hopper.jpg": "James S. Davis, United States Navy, public domain (matplotlib)",
    "grass.png": "linolafett, CC0 (scikit-image)",
    "gravel.png": "CC0 textures, CC0 (scikit-image)",
    "hubble_deep_field.jpg": "NASA, public domain (scikit-image)",
    "ihc.png": "CMMI, no known copyright restrictions (scikit-image)",
    "retina.jpg": "Mikael Häggström, CC0 (scikit-image)",
    "rocket.jpg": "SpaceX, public domain (scikit-image)",
}
CROPS_PER_PHOTO = 4


def write_evalset(folder: Path, photos: Path | None) -> None:
    """Draw the evaluation set anew from its own seeds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tally: Counter[str] = Counter()
    rows = []
    for kind, count, sizes in DRAWN:
        for index in range(count):
            rows += _drawn_rows(folder, kind, index, sizes[index % len(sizes)], tally)
    if photos is not None:
        rows += _photo_rows(folder, photos)
    evalset.write_index(folder, rows)
    notice = ["Photographs, cropped and made smaller; everything else is drawn by this repository.", ""]
    notice += [f"{name}: {source}" for name, source in PHOTOS.items()]
    (folder / "NOTICE").write_text("\n".join(notice) + "\n", encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"evalset: {len(rows)} rows, {size / 2**20:.2f} MiB, clean questions {dict(tally)}")


def _drawn_rows(
    folder: Path, kind: str, index: int, size: tuple[int, int], tally: Counter[str]
) -> list[dict]:
    """The clean and the badly photographed row of one scene."""
    rng = stream("eval", [name for name, _, _ in DRAWN].index(kind), index)
    scene = compose(rng, *size, kind)
    frames = draw_scene(rng, scene)
    turns = _rare_turns(rng, scene, tally)
    recipe = replace(plan(rng, *size, 1.0, every=True), quality=0)
    bad = np.stack([shoot(rng, frame, recipe) for frame in frames])
    name = f"{kind}-{index:02d}"
    clean = evalset.write_row(folder, name, "clean", Example(frames, turns, kind))
    return [clean, evalset.write_row(folder, f"{name}-bad", "bad", Example(bad, turns, kind), BAD_JPEG)]


def _rare_turns(rng: np.random.Generator, scene: Scene, tally: Counter[str]) -> tuple[Turn, ...]:
    """A caption and up to three questions of the tasks that were asked least so far."""
    tasks = STILL_TASKS if scene.motion is None else CLIP_TASKS
    turns = [ASKERS["caption"](rng, scene)]
    for task in sorted(tasks[1:], key=lambda task: (tally[task], rng.random())):
        turn = ASKERS[task](rng, scene)
        if turn is not None and turn.task == task and len(turns) < 4:
            turns.append(turn)
    tally.update(turn.task for turn in turns if turn is not None)
    return tuple(turn for turn in turns if turn is not None)


def _photo_rows(folder: Path, photos: Path) -> list[dict]:
    """Crops of the held-out photographs with honest answers."""
    rows = []
    for number, name in enumerate(PHOTOS):
        image = cv2.imread(str(photos / name), cv2.IMREAD_COLOR)
        if image is None:
            raise FileNotFoundError(f"{photos / name} is missing")
        for crop in range(CROPS_PER_PHOTO):
            rng = stream("eval", 9, number, crop)
            picture = _crop(rng, image[..., ::-1], crop)
            turns = ask_unknown(rng, *main_colours(picture))
            example = Example(picture[None], turns, "unknown")
            rows.append(evalset.write_row(folder, f"photo-{Path(name).stem}-{crop}", "photo", example, 85))
    return rows


def _crop(rng: np.random.Generator, image: np.ndarray, number: int) -> np.ndarray:
    """The whole photograph (number 0) or a part of it, at a small size."""
    height, width = image.shape[:2]
    part = 1.0 if number == 0 else rng.uniform(0.45, 0.9)
    side = int(min(height, width) * part)
    top, left = int((height - side) * rng.random()), int((width - side) * rng.random())
    out = (128, 128) if number % 2 else (160, 160)
    cut = image[top : top + side, left : left + side]
    return np.ascontiguousarray(cv2.resize(cut, out, interpolation=cv2.INTER_AREA))


def thing(name: str) -> Noun:
    """A drawn thing by its name."""
    return Noun("thing", name, category=things()[name][1])


def sample_scenes() -> dict[str, Scene]:
    """The pictures of ``samples/`` by file stem."""
    bold = word_fonts()[0]
    apple, circle = thing("apple"), Noun("shape", "circle", "red")
    four = [thing("sun"), thing("house"), thing("tree"), thing("car")]
    spots = [(88, 88), (262, 88), (88, 262), (262, 262)]
    word, hello = Noun("word", "tea", "brown", "word"), Noun("word", "hello", "yellow", "word")
    return {
        "cat": Scene("single", (Item(thing("cat"), "in the centre", 160, 160, 170, 6),), "green", 320, 320),
        "circle-rabbit": Scene(
            "row2",
            (
                Item(circle, "on the left", 100, 128, 120, 0),
                Item(thing("rabbit"), "on the right", 284, 128, 130, 0),
            ),
            "yellow",
            256,
            384,
        ),
        "apples": Scene(
            "row3",
            tuple(Item(apple, "", x, 128, 96, a) for x, a in ((70, -8), (192, 4), (314, 10))),
            "white",
            256,
            384,
        ),
        "village": Scene(
            "quad",
            tuple(
                Item(noun, place, x, y, 118, 0)
                for noun, place, (x, y) in zip(four, CORNERS, spots, strict=True)
            ),
            "blue",
            352,
            352,
        ),
        "hello": Scene(
            "single", (Item(hello, "in the centre", 160, 112, 250, -3, bold, "hello"),), "purple", 224, 320
        ),
        "tea": Scene(
            "column2",
            (
                Item(thing("teapot"), "at the top", 144, 116, 140, 0),
                Item(word, "at the bottom", 144, 290, 150, 0, bold, "TEA"),
            ),
            "white",
            384,
            288,
        ),
        "penguin-print": Scene(
            "single", (Item(thing("penguin"), "on the left", 92, 128, 120, -5),), "orange", 256, 352
        ),
    }


def rocket_clip(frames: int = 32) -> Scene:
    """The clip of ``samples/``: a rocket that rises on a black ground."""
    rocket = Item(thing("rocket"), "", 128, 190, 84, 0)
    return Scene("single", (rocket,), "black", 256, 256, Motion("moves up", frames, end=(128.0, 60.0, 84.0)))


def write_samples(folder: Path, photos: Path | None) -> None:
    """Write the sample pictures, the clip and ``samples.json`` with the true captions."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    index: list[dict[str, object]] = []
    for number, (name, scene) in enumerate(sample_scenes().items()):
        rng = stream("samples", number)
        frame = draw_scene(rng, scene)
        if name.endswith("-print"):
            frame = photograph(rng, frame, 0.7, every=True)
        cv2.imwrite(str(folder / f"{name}.jpg"), frame[0][..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
        index.append({"file": f"{name}.jpg", "kind": "image", "caption": caption(scene)})
    if photos is not None:
        source = cv2.imread(str(photos / "coffee.png"), cv2.IMREAD_COLOR)
        if source is None:
            raise FileNotFoundError(f"{photos / 'coffee.png'} is missing")
        image = cv2.resize(source, (384, 256), interpolation=cv2.INTER_AREA)
        cv2.imwrite(str(folder / "photograph.jpg"), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        main, fair = main_colours(np.ascontiguousarray(image[..., ::-1]))
        text = unknown_sentence(main)
        index.append({"file": "photograph.jpg", "kind": "image", "caption": text, "colours": fair})
        (folder / "NOTICE").write_text(f"photograph.jpg: {PHOTOS['coffee.png']}\n", encoding="utf-8")
    clip = rocket_clip()
    write_clip(folder / "rocket.mp4", draw_scene(stream("samples", 99), clip), fps=8)
    index.append({"file": "rocket.mp4", "kind": "video", "caption": caption(clip)})
    (folder / "samples.json").write_text(
        json.dumps(index, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    for row in index:
        print(f"{row['file']:<22} {row['caption']}")


def write_clip(path: Path, frames: np.ndarray, fps: int) -> None:
    """Write uint8 RGB frames as an H.264 file."""
    with av.open(str(path), "w") as container:
        track = container.add_stream("libx264", rate=fps, options={"crf": "20"})
        track.height, track.width, track.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(track.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(track.encode())


def main() -> None:
    """Write both folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, help="folder with the held-out photographs")
    options = parser.parse_args()
    write_samples(SAMPLES, options.photos)
    write_evalset(evalset.FOLDER, options.photos)


if __name__ == "__main__":
    main()
