"""What tests of the placard's page in a browser share: tiny-vl, placards before it, films and screenshots."""

import functools
import os
from contextlib import contextmanager
from pathlib import Path

import pytest


def pytest_terminal_summary(terminalreporter):
    """Say loudly that pages were not tested, and what brings a browser."""
    skipped = [each for each in terminalreporter.stats.get("skipped", []) if "chromium" in str(each.longrepr)]
    if skipped:
        told = f"{len(skipped)} tests need a browser and were skipped: apt-get install -y chromium brings one"
        terminalreporter.write_line(told, yellow=True)


@pytest.fixture(scope="module")
def film_of(tmp_path_factory):
    from helpers.browser import y4m
    from helpers.placard_page import SCENE_S, picture

    folder = tmp_path_factory.mktemp("films")

    @functools.cache
    def film(*names):
        """A film of a few seconds of each of these samples; None is darkness."""
        pictures = [picture(name) for name in names]
        return y4m(folder / f"{'-'.join(map(str, names))}.y4m", pictures, each=int(10 * SCENE_S))

    return film


@pytest.fixture(scope="module")
def tiny_service():
    """tiny-vl, for pages of this machine that show cameras by WebRTC, too. Its pools are full within minutes,
    so that what grows then does not end."""
    from mmserve.core.config import Config
    from mmserve.service import Service

    pools = {"kv_cache_mib": 64, "encoder_cache_mib": 8, "early_answers_mib": 2, "pixel_cache_mib": 16}
    config = Config.of(webrtc_hosts="127.0.0.1", webrtc_private=True, drain_s=1, **pools)
    service = Service.load(config)
    yield service
    service.close()


@pytest.fixture
def hang(tiny_service, tmp_path):
    """The URL of a placard with these options."""
    from live_server import serving

    from mmserve.demos.placard.app import create_placard
    from mmserve.demos.placard.counts import Counts
    from mmserve.demos.placard.options import PlacardOptions
    from mmserve.demos.placard.settings import Host
    from mmserve.demos.placard.store import Store

    @contextmanager
    def hang(**options):
        options = PlacardOptions(folder=str(tmp_path / "labels"), still_s=0.5, **options)
        store = Store(options.path)
        store.prepare()
        host = Host(tiny_service.model_name, bundled=True)
        with serving(
            tiny_service, tiny_service.config, create_placard(options, store, host, Counts())
        ) as url:
            yield url

    return hang


@pytest.fixture
def shots(tmp_path):
    """Where screenshots go."""
    folder = Path(os.environ.get("MMSERVE_SHOTS") or tmp_path / "shots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
