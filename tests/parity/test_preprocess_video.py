"""Video against golden values of transformers' video processors (made by make_video_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import golden_cases as cases
from helpers.tiny_folder import write_folder

from mmserve.core.config import MediaOptions
from mmserve.core.messages import VideoPart
from mmserve.preprocess.sampling import frame_count, frame_indices
from mmserve.preprocess.spec import ProcessorSpec
from mmserve.preprocess.video import read_video

GOLDEN = Path(__file__).parent / "golden"
NOTES = json.loads((GOLDEN / "prompts.json").read_text())
# torchvision resizes uint8 frames with its own fixed-point bicubic; ours is Pillow's.
WORST_LEVELS = 1
MEAN_LEVELS = 0.01


def spec_of(tmp_path, family):
    return ProcessorSpec.load(write_folder(tmp_path, family, clip=cases.BUDGETS[family], video={"fps": 2}))


@pytest.mark.parametrize("family", cases.RESIZED)
@pytest.mark.parametrize("name", cases.SHAPES)
def test_resized_frames_equal_torchvision_within_one_level(tmp_path, family, name):
    expected = np.load(GOLDEN / "video.npz")[f"{family}/{name}"]
    part = VideoPart(frames=cases.moving(*cases.SHAPES[name]))
    medium = read_video(part, spec_of(tmp_path, family), MediaOptions())
    ours = np.concatenate(medium.pixels)
    assert ours.shape == expected.shape
    distance = np.abs(ours.astype(int) - expected)
    assert distance.max() <= WORST_LEVELS
    assert distance.mean() <= MEAN_LEVELS


@pytest.mark.parametrize("family", cases.RESIZED)
def test_frames_chosen_equal_transformers(tmp_path, family):
    spec = spec_of(tmp_path, family)
    for total, rate, fps, number, expected in NOTES["frames"][family]:
        count = frame_count(total, rate, spec, fps, number, 768)
        assert frame_indices(total, count, spec).tolist() == expected, (total, rate, fps, number)
