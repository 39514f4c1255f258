"""The numbers of a server's cameras as Prometheus shows them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import get_args

from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmserve.live.cameras import Cameras, Kind


class CameraFigures(Collector):
    def __init__(self, cameras: Cameras) -> None:
        self._cameras = cameras

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        running = self._cameras.stats()
        family = GaugeMetricFamily("mmserve_cameras", "Cameras that run, by how they come", labels=["kind"])
        for kind in get_args(Kind):
            family.add_metric([kind], running.get(kind, 0))
        return [family]


@contextmanager
def counted(cameras: Cameras, registry: CollectorRegistry) -> Iterator[None]:
    """Show the numbers of ``cameras`` in ``registry`` inside the block."""
    figures = CameraFigures(cameras)
    registry.register(figures)
    try:
        yield
    finally:
        registry.unregister(figures)
