"""A real server for cameras without a model: its sessions take note of what they are given."""

from contextlib import contextmanager

from fake_service import FakeService
from helpers.camera_clients import KEY
from live_server import serving

from mmserve.core.config import Config

OTHER = "o" * 20  # another key than ``KEY`` that it takes


@contextmanager
def camera_server(tmp_path, **options):
    given = {
        "api_key": f"{KEY},{OTHER}",
        "webrtc_hosts": "127.0.0.1",
        "webrtc_private": True,
        "pull_cameras": True,
        "allow_private_cameras": True,
        "media_root": str(tmp_path),
        "drain_s": 1,
        **options,
    }
    service = FakeService()
    with serving(service, Config.of(**given)) as url:
        yield service, url
