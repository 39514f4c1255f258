"""``mmserve serve``: the REST service."""

import argparse
from typing import Any

from mmserve.core.config import BUNDLED_MODEL, add_arguments, from_arguments

ALL = ("model", "server", "live", "realtime", "cameras", "media", "scheduler", "cache", "runner")


def add(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP (OpenAI-compatible)")
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"model folder or hub name (default: {BUNDLED_MODEL}, which comes with mmserve)",
    )
    add_arguments(parser, *ALL, skip=("model",))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = from_arguments(args)
    from mmserve.launch import serve

    return serve(config)
