"""The command line: each command is a module of ``mmserve.commands``, and torch waits until one runs."""

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from mmserve import __version__
from mmserve.commands import batch, bench, camera, caption, chat, demo, doctor, evaluate, serve
from mmserve.core.env import prepare_environment
from mmserve.core.errors import ConfigError, MMServeError

COMMANDS = (serve, caption, chat, camera, batch, evaluate, bench, demo, doctor)
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    args = parser().parse_args(argv)
    prepare_environment()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # what is wrong with a file is told to its sender
    try:
        return int(args.run(args))
    except MMServeError as error:
        print(f"mmserve {args.command}: {error.message}", file=sys.stderr)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="mmserve", description="Pictures and video go in, text comes out.")
    top.add_argument("--version", action="version", version=f"mmserve {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return top


if __name__ == "__main__":
    sys.exit(main())
