"""``mmserve demo placard``: ``mmserve serve`` with the placard beside the API, and a browser to show it."""

import argparse
import logging
import os
import sys
import threading
import webbrowser
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mmserve.commands import serve
from mmserve.demos.placard.options import PlacardOptions
from mmserve.options import BUNDLED_MODEL, Config, add_flags, section_from

if TYPE_CHECKING:
    from mmserve.demos.placard.counts import Counts
    from mmserve.extension import Extension

ROOT = "/placard"
NO_PLACE = ("0.0.0.0", "::")  # hosts that stand for all addresses


def add(demos: Any) -> None:
    parser = demos.add_parser(
        "placard",
        help="a camera sees a scene, and a museum's wall label about it writes itself in the browser",
    )
    parser.add_argument(
        "--no-browser", dest="browser", action="store_false", help="do not open the browser when it is ready"
    )
    add_flags(parser.add_argument_group("placard"), PlacardOptions)
    serve.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config, options = serve.config_of(args), section_from(PlacardOptions, args)
    from mmserve.demos.placard.counts import Counts
    from mmserve.launch import serve as serve_beside

    counts = Counts()
    exhibition = Exhibition(config, options, counts, args.browser)
    try:
        return serve_beside(config, exhibition.beside)
    finally:
        if options.kiosk:
            counts.tell()


class Exhibition:
    """One start of the command. What cannot be, as a folder that cannot be written, is a ConfigError here,
    before a model is loaded."""

    def __init__(self, config: Config, options: PlacardOptions, counts: "Counts", browser: bool) -> None:
        from mmserve.demos.placard.store import Store

        self.config, self.options, self.counts, self.browser = config, options, counts, browser
        self.store = Store(options.path, options.keep_labels)
        if options.saving != "off":
            self.store.prepare()
        self.names: tuple[str, ...] = ()
        self.certificate = self._certificate() if options.https else None

    def beside(self, model: str) -> "Extension":
        """The placard beside the API of a server with ``model``."""
        from mmserve.demos.placard.app import create_placard
        from mmserve.demos.placard.settings import Host

        bundled = self.config.model.model == BUNDLED_MODEL
        host = Host(model, bundled, keyed=bool(self.config.server.api_keys))
        if self.options.kiosk and self.options.saving == "off":
            logging.getLogger("mmserve.access").setLevel(logging.WARNING)  # counts are all that is told
        placard = create_placard(self.options, self.store, host, self.counts)
        return replace(placard, certificate=self.certificate, ready=self.show, show_cameras=True)

    def show(self, url: str) -> None:
        """Say where the placard hangs, and open the browser."""
        print(f"\nthe placard hangs at {url}{ROOT}/", flush=True)
        for other in self._elsewhere(url):
            print(f"  on this network, for phones: {other}{ROOT}/", flush=True)
        if self.options.saving != "off":
            print(
                f"  labels that are saved are kept, with their pictures, in {self.store.folder}", flush=True
            )
        if not self.options.https and self.config.server.host in NO_PLACE:
            print("  phones show their camera to https alone: add --https", flush=True)
        print("  ctrl-C takes it down", flush=True)
        if self.browser and not _has_display():
            print("  open that address in a browser: there is no display here to open one on", flush=True)
        elif self.browser:
            threading.Thread(target=self._open, args=(url,), daemon=True).start()

    def _open(self, url: str) -> None:
        webbrowser.open(f"{url}{ROOT}/{'?kiosk' if self.options.kiosk else ''}")
        if self.options.screen:
            webbrowser.open_new(f"{url}{ROOT}/?screen")

    def _elsewhere(self, url: str) -> list[str]:
        """The same server by the addresses at which others reach it."""
        if self.config.server.host not in NO_PLACE:
            return []
        from mmserve.demos.placard.certificate import addresses

        scheme, _, rest = url.partition("://")
        port = rest.rpartition(":")[2]
        hosts = [f"[{address}]" if ":" in address else address for address in addresses()]
        return [f"{scheme}://{host}:{port}" for host in hosts]

    def _certificate(self) -> tuple[Any, Any]:
        from mmserve.demos.placard.certificate import certificate, names_of_host

        return certificate(self.options.path / "https", names_of_host(self.config.server.host))


def _has_display() -> bool:
    """Whether a browser that is opened would be seen."""
    return not sys.platform.startswith("linux") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
