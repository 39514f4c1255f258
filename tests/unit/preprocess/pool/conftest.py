import pytest
from helpers.pool_watch import settle
from helpers.tiny_folder import write_folder

from mmserve.core.config import MediaOptions
from mmserve.preprocess.pool.pool import WorkerPool
from mmserve.preprocess.processor import Processor
from mmserve.preprocess.spec import ProcessorSpec


@pytest.fixture(scope="session")
def spec(tmp_path_factory):
    return ProcessorSpec.load(write_folder(tmp_path_factory.mktemp("pool") / "qwen3"))


@pytest.fixture(scope="session")
def processor(spec):
    """What every worker must agree with, in this process."""
    return Processor(spec, MediaOptions())


@pytest.fixture(scope="session")
def make_pool(spec):
    """Pools of any options, one of each kind; all are idle and empty in the end."""
    pools = {}

    def make(**options):
        key = tuple(sorted(options.items()))
        if key not in pools:
            pools[key] = WorkerPool(spec, MediaOptions(**options))
            pools[key].wait_ready()
        return pools[key]

    yield make
    for pool in pools.values():
        settle(pool)
        pool._keeper.close()


@pytest.fixture
def pool(make_pool):
    """Two workers, shared by the tests; each leaves it idle, with nothing in the arena."""
    pool = make_pool()
    yield pool
    settle(pool)


@pytest.fixture
def single(make_pool):
    """One worker with little memory in a small arena, and few places."""
    pool = make_pool(workers=1, worker_memory_mib=256, arena_mib=32, max_preparing=4)
    yield pool
    settle(pool)
