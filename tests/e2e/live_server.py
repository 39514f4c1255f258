"""A real server on a real socket, in a thread of the test's process."""

import threading
from contextlib import contextmanager

import uvicorn

from mmserve.launch import base_url, bound, server_config
from mmserve.server.app import create_app


@contextmanager
def serving(service, config, beside=None):
    """The URL of a server over ``service``, with what is served ``beside`` the API, up inside the block."""
    with bound("127.0.0.1", 0) as listener:
        certificate = beside.certificate if beside else None
        settings = server_config(create_app(service, config, beside), config, certificate)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            while not server.started and thread.is_alive():
                thread.join(0.01)
            yield base_url(listener, "https" if certificate else "http")
        finally:
            server.should_exit = True
            thread.join(10)
