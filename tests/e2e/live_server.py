"""A real server on a real socket, in a thread of the test's process."""

import threading
from contextlib import contextmanager

import uvicorn

from mmserve.launch import base_url, bound, server_config
from mmserve.server.app import create_app


@contextmanager
def serving(service, config):
    """The URL of a server over ``service`` that is up inside the block."""
    with bound("127.0.0.1", 0) as listener:
        server = uvicorn.Server(server_config(create_app(service, config), config))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            yield base_url(listener)
        finally:
            server.should_exit = True
            thread.join(10)
