"""What a picture looks like in few grey pixels: enough to see whether a camera's scene has changed."""

import numpy as np
from PIL import Image

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess.image import check_size, open_picture, reading
from mmserve.preprocess.pixels import to_rgb

SIDE = 64  # pixels of the longer side

TOO_BIG = "frame_too_big"  # the code of a picture beyond a limit


def thumbnail_size(height: int, width: int) -> tuple[int, int]:
    """(height, width) of the thumbnail: the longer side ``SIDE``, the aspect kept, neither below 4."""
    scale = SIDE / max(height, width)
    return max(4, round(height * scale)), max(4, round(width * scale))


def luma_of_file(data: bytes, options: MediaOptions) -> np.ndarray:
    """uint8 [h, w] of an encoded picture, not turned upright.

    A JPEG is decoded at an eighth of its size, or a quarter or a half, and in grey, which skips most of the
    work. MediaError when it cannot be read, with the code ``TOO_BIG`` when it is beyond the limits.
    """
    if not data:
        raise MediaError("the frame is empty (0 bytes)")
    if len(data) > options.max_image_bytes:
        raise MediaError(
            f"the frame has {len(data)} bytes; at most {options.max_image_bytes} are allowed", code=TOO_BIG
        )
    with reading(), open_picture(data) as image:
        try:
            check_size(image.height, image.width, options)
        except MediaError as error:
            raise MediaError(error.message, code=TOO_BIG) from None
        size = thumbnail_size(image.height, image.width)
        image.draft("L", (size[1], size[0]))  # for JPEG alone; others ignore it
        image.load()
        grey = image if image.mode == "L" else to_rgb(image, (255, 255, 255)).convert("L")
        return np.asarray(grey.resize((size[1], size[0]), Image.Resampling.BOX))


def luma_of_pixels(pixels: np.ndarray) -> np.ndarray:
    """uint8 [h, w] of uint8 RGB pixels [H, W, 3]; of large ones every n-th row and column is read."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise MediaError(f"pixels must be uint8 [height, width, 3], not {pixels.dtype} {list(pixels.shape)}")
    height, width = pixels.shape[:2]
    size = thumbnail_size(height, width)
    step = max(1, min(height // (4 * size[0]), width // (4 * size[1])))
    image = Image.fromarray(np.ascontiguousarray(pixels[::step, ::step])).convert("L")
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BOX))
