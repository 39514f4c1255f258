import pytest
from helpers.tiny_model import write_model

from mmserve import LLM


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    """The offline API over a tiny random model; its service is shared."""
    with LLM(write_model(tmp_path_factory.mktemp("served")), threads=2, kv_cache_mib=8) as llm:
        yield llm


@pytest.fixture(scope="session")
def service(llm):
    return llm.service
