"""How the server's processes log: to standard error, one line a thing."""

import logging

CHATTY = ("httpx", "httpcore", "uvicorn", "uvicorn.error")


def set_up_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)
