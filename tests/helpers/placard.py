"""Labels and pictures for tests of the placard."""

import io
import re

import cv2
import numpy as np
from PIL import Image

from mmserve.demos.placard.labels import Label
from mmserve.demos.placard.store import Saved, new_id

FIELDS = {
    "title": "Red Circle on Blue",
    "medium": "digital image, colour",
    "date": "undated",
    "text": "A red circle holds its place. The blue ground lets the plain geometry speak.",
    "alt_text": "A red circle in the centre of a blue ground.",
    "maker": "Unknown maker",
    "dimensions": "dimensions variable",
    "credit_line": "On loan from the present",
}


def jpeg(colour="red", size=(64, 48), **options):
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "JPEG", **options)
    return out.getvalue()


def saved(name=None, **fields):
    """A label that may be kept; ``fields`` stand in the label itself."""
    moment = "2026-12-01T09:30:00+00:00"
    label = Label(**{**FIELDS, **fields})
    return Saved(name or new_id(), label, "curator", "en", "a/model", moment, moment, 64, 48)


def read_code(svg):
    """What a QR code drawn as SVG by segno says: its path of rows is filled in, and looked at by OpenCV."""
    width = int(re.search(r'<path fill="#fff" d="M0 0h(\d+)', svg)[1])
    pixels = np.full((width, width), 255, np.uint8)
    x = y = 0
    for kind, numbers in re.findall(r"([Mmh])([-\d. ]+)", re.search(r'stroke="#000" d="([^"]+)"', svg)[1]):
        values = [float(number) for number in numbers.split()]
        if kind == "M":
            x, y = int(values[0]), int(values[1])
        elif kind == "m":
            x, y = x + int(values[0]), y + int(values[1])
        else:
            pixels[y, x : x + int(values[0])] = 0
            x += int(values[0])
    for scale in (8, 5, 11):  # OpenCV overlooks one code in a hundred, but seldom twice
        for turns in range(4):
            large = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=cv2.INTER_NEAREST)
            if said := cv2.QRCodeDetector().detectAndDecode(np.rot90(large, turns).copy())[0]:
                return said
    return ""
