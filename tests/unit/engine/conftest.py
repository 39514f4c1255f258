import pytest
from helpers.qwen_pairs import Pair


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A tiny random Qwen3-VL in float32."""
    return Pair("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
