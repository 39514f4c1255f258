"""How the server's processes log: to standard error, one line a thing."""

import faulthandler
import logging
import signal

CHATTY = ("httpx", "httpcore", "uvicorn", "uvicorn.error")
STACKS_SIGNAL = signal.SIGUSR1


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def tell_stacks_on_signal() -> None:
    """Have this process write the stacks of all its threads to standard error at ``STACKS_SIGNAL``."""
    faulthandler.register(STACKS_SIGNAL)
