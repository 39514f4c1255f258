"""Pixels and grids against transformers' Pillow image processor: equal, not close."""

import io

import numpy as np
import pytest
from helpers import golden_cases as cases
from helpers.tiny_folder import FAMILIES, write_folder
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mmserve.core.config import MediaOptions
from mmserve.core.messages import ImagePart
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec

SIZES = [(1, 1), (1, 28), (28, 28), (2, 2), (27, 257), (500, 19), (19, 500), (2, 400), (100, 160), (64, 64)]
SIZES += [(224, 224), (333, 517), (1080, 720), (768, 1025)]
BUDGET = (3136, 250_000)


def theirs_of(image, patch):
    """(uint8 [H, W, 3], grid) as transformers' processor sees it."""
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": BUDGET[0], "longest_edge": BUDGET[1]}
    )
    out = processor(images=[image], do_rescale=False, do_normalize=False)
    _, h, w = (int(v) for v in out["image_grid_thw"][0])
    patches = np.asarray(out["pixel_values"]).reshape(h // 2, w // 2, 2, 2, 3, 2, patch, patch)
    pixels = patches.transpose(5, 0, 2, 6, 1, 3, 7, 4).reshape(2, h * patch, w * patch, 3)
    assert (pixels[0] == pixels[1]).all()
    return pixels[0].astype(np.uint8), (h, w)


def ours_of(tmp_path, family, data):
    spec = ProcessorSpec.load(write_folder(tmp_path, family, budget=BUDGET))
    return Processor(spec, MediaOptions()).see(ImagePart(data=data))


def file_of(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def assert_equal(tmp_path, family, data):
    expected, grid = theirs_of(Image.open(io.BytesIO(data)), FAMILIES[family][0])
    medium = ours_of(tmp_path, family, data)
    assert medium.grid == grid
    assert (medium.pixels[0][0] == expected).all()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("size", SIZES)
def test_rgb_of_any_size(tmp_path, family, size):
    assert_equal(tmp_path, family, file_of(Image.fromarray(cases.picture(*size))))


@pytest.mark.parametrize("mode", ["L", "1", "LA", "RGBA", "P"])
def test_modes(tmp_path, mode):
    rgba = Image.fromarray(np.dstack([cases.picture(120, 90), cases.picture(120, 90)[..., 1]]), "RGBA")
    assert_equal(tmp_path, "qwen3_vl", file_of(rgba.convert(mode)))


def test_palette_with_transparency(tmp_path):
    image = Image.fromarray(cases.picture(60, 60)).convert("P")
    assert_equal(tmp_path, "qwen2_vl", file_of(image, transparency=7))


def test_jpeg_and_cmyk_jpeg(tmp_path):
    image = Image.fromarray(cases.picture(200, 300))
    assert_equal(tmp_path, "qwen3_vl", file_of(image, "JPEG", quality=80))
    assert_equal(tmp_path, "qwen3_vl", file_of(image.convert("CMYK"), "JPEG"))


def test_too_long_a_picture_is_refused_as_there(tmp_path):
    from mmserve.core.errors import MediaError

    data = file_of(Image.new("RGB", (402, 2)))
    with pytest.raises(ValueError, match="aspect ratio"):
        theirs_of(Image.new("RGB", (402, 2)), 16)
    with pytest.raises(MediaError, match="aspect ratio"):
        ours_of(tmp_path, "qwen3_vl", data)
