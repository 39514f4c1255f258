import pytest
from helpers.tiny_folder import write_folder

from mmserve.core.config import MediaOptions
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec


@pytest.fixture
def options():
    return MediaOptions()


@pytest.fixture
def spec(tmp_path):
    return ProcessorSpec.load(write_folder(tmp_path / "qwen3"))


@pytest.fixture
def qwen2(tmp_path):
    return ProcessorSpec.load(write_folder(tmp_path / "qwen2", "qwen2_vl"))


@pytest.fixture
def processor(spec, options):
    return Processor(spec, options)
