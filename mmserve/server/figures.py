"""The numbers that are a server's own, beside those of its service, as Prometheus shows them."""

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import get_args

from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmserve.live.cameras import Cameras, Kind


class ServerFigures(Collector):
    """The cameras that run, and the ``links`` of clients to /v1/realtime, at the moment of a scrape."""

    def __init__(self, cameras: Cameras, links: Sized) -> None:
        self._cameras, self._links = cameras, links

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        running = self._cameras.stats()
        cameras = GaugeMetricFamily("mmserve_cameras", "Cameras that run, by how they come", labels=["kind"])
        for kind in get_args(Kind):
            cameras.add_metric([kind], running.get(kind, 0))
        doc = "Clients that are connected to /v1/realtime"
        return [cameras, GaugeMetricFamily("mmserve_realtime_clients", doc, len(self._links))]


@contextmanager
def counted(cameras: Cameras, links: Sized, registry: CollectorRegistry) -> Iterator[None]:
    """Show these numbers in ``registry`` inside the block."""
    figures = ServerFigures(cameras, links)
    registry.register(figures)
    try:
        yield
    finally:
        registry.unregister(figures)
