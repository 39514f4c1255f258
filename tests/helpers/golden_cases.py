"""The inputs of the golden values: pictures and clips by arithmetic, sampling cases, chats."""

import numpy as np

# Fewest and most pixels: of a frame (Qwen2-VL, Qwen2.5-VL), of a clip (Qwen3-VL), and of an image.
BUDGETS = {"qwen2_vl": (3136, 9408), "qwen2_5_vl": (3136, 9408), "qwen3_vl": (4096, 24576)}

# name -> (frames, height, width)
SHAPES = {"smaller": (4, 150, 220), "larger": (2, 20, 30), "odd": (3, 90, 61), "kept": (2, 64, 64)}

RESIZED = ("qwen2_vl", "qwen3_vl")  # Qwen2.5-VL's video processor is Qwen2-VL's

# role, parts; a part is (kind, text) or (kind, shape...)
CHATS = {
    "text": [("user", [("text", "Hello world, what is this?")])],
    "image": [("user", [("image", 100, 160), ("text", "describe the picture")])],
    "two images": [
        ("system", [("text", "Look.")]),
        (
            "user",
            [("text", "Look at"), ("image", 56, 80), ("text", "and"), ("image", 200, 30), ("text", "which?")],
        ),
        ("assistant", [("text", "The red one.")]),
        ("user", [("text", "čaj 12 34 == !?")]),
    ],
    "video": [("user", [("video", 5, 48, 96), ("text", "What is in this clip?")])],
    "mixed": [("user", [("video", 4, 60, 60), ("image", 64, 64), ("text", "answer"), ("video", 2, 64, 32)])],
}


def picture(height, width):
    """uint8 [H, W, 3]: a smooth half, and a half full of edges."""
    return moving(1, height, width)[0]


def moving(frames, height, width):
    """uint8 [F, H, W, 3]."""
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    edges = (x * 37 + t * 20) ^ (y * 21)
    smooth = x * 255 // width + y * 60 // height + t * 9
    planes = [np.where(x > width // 2, edges * (c + 1), smooth + c * 40) for c in range(3)]
    return (np.stack(planes, axis=-1) % 256).astype(np.uint8)


def sampling_cases(family):
    """(total frames, source frames a second, fps, num_frames): those that transformers accepts."""
    fps = [
        (t, r, f, None)
        for t in (2, 3, 5, 30, 61, 299, 3000)
        for r in (24.0, 29.97, 30.0)
        for f in (None, 1.0, 4.0)
    ]
    numbers = [(t, 25.0, None, n) for t in (8, 30, 61, 299) for n in (2, 4, 7, 8)]
    return fps + numbers


def plain(chat):
    """A chat as transformers takes it."""
    return [
        {
            "role": role,
            "content": [{"type": p[0], **({"text": p[1]} if p[0] == "text" else {})} for p in parts],
        }
        for role, parts in chat
    ]
