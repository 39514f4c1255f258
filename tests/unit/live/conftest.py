import pytest
from helpers.live_host import FakeHost
from helpers.tiny_folder import write_folder

from mmserve.preprocess.spec import ProcessorSpec


@pytest.fixture(scope="session")
def spec(tmp_path_factory):
    return ProcessorSpec.load(write_folder(tmp_path_factory.mktemp("live"), clip=(1024, 1 << 16)))


@pytest.fixture
def host(spec):
    return FakeHost(spec)
