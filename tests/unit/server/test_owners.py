"""Several API keys: each is an owner, told apart at the door."""

import pytest

from mmserve.core.config import ServerOptions
from mmserve.server.door import Door, owner_of
from mmserve.server.drain import Drain


async def owner_seen(keys, shown, path="/v1/models"):
    """The owner that the app is told of, or the status of the refusal."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["owner"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    headers = [] if shown is None else [(b"authorization", f"Bearer {shown}".encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers}
    await Door(app, ServerOptions(api_key=keys), Drain())(scope, receive, send)
    return seen[0]


@pytest.mark.parametrize("keys", ["one,two", " one , two "])
async def test_each_key_is_an_owner_of_its_own(keys):
    assert await owner_seen(keys, "one") == owner_of("one")
    assert await owner_seen(keys, "two") == owner_of("two") != owner_of("one")


@pytest.mark.parametrize("shown", [None, "three", "one,two", "", "on"])
async def test_any_other_key_is_refused(shown):
    assert await owner_seen("one,two", shown) == 401


async def test_one_key_stays_the_owner_it_was_and_none_is_anonymous():
    assert await owner_seen("one", "one") == owner_of("one")
    assert await owner_seen(None, None) == owner_of(None)
    assert await owner_seen("one", None, path="/health/live") == owner_of(None)
