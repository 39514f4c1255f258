"""``mmserve serve``: the REST service."""

import argparse
from typing import Any

from mmserve.core.config import BUNDLED_MODEL, Config, add_arguments, from_arguments

ALL = ("model", "server", "live", "realtime", "cameras", "media", "scheduler", "cache", "runner")


def add(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP (OpenAI-compatible)")
    add_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What to serve and how, for this command and those that serve something more."""
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help=f"model folder or hub name (default: {BUNDLED_MODEL}, which comes with mmserve)",
    )
    add_arguments(parser, *ALL, skip=("model",))


def config_of(args: argparse.Namespace) -> Config:
    """What the options say; ConfigError where they cannot be."""
    return from_arguments(args)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    from mmserve.launch import serve

    return serve(config)
