"""Applications beside the API: what of them is open, and where a key in a cookie counts."""

import pytest
from starlette.requests import Request

from mmserve.core.config import ServerOptions
from mmserve.extension import Extension, key_cookie, shows_key
from mmserve.server.door import Door, owner_of
from mmserve.server.drain import Drain

HOST = "here:8000"


async def nothing(scope, receive, send):
    pass


BESIDE = Extension("/placard", nothing, is_open=lambda path: path in ("/", "/open"), cookie="placard_key")


async def owner_seen(path, method="GET", keys="one,two", kind="http", **headers):
    """The owner that the app is told of, or the status of the refusal."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["owner"])

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    raw = [(b"host", HOST.encode()), *((name.encode(), value.encode()) for name, value in headers.items())]
    scope = {"type": kind, "method": method, "path": path, "headers": raw}
    await Door(app, ServerOptions(api_key=keys), Drain(), beside=BESIDE)(scope, receive, send)
    return seen[0]


@pytest.mark.parametrize("path", ["/", "/placard", "/placard/", "/placard/open"])
async def test_what_is_open_needs_no_key_to_be_read(path):
    assert await owner_seen(path) == owner_of(None)
    assert await owner_seen(path, "HEAD") == owner_of(None)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/placard/labels", "GET"),
        ("/placard/opener", "GET"),
        ("/placardopen", "GET"),
        ("/open", "GET"),
        ("/v1/models", "GET"),
        ("/placard/open", "DELETE"),
        ("/placard/open", "POST"),
    ],
)
async def test_everything_else_needs_one(path, method):
    assert await owner_seen(path, method) == 401


async def test_a_key_that_is_shown_is_known_where_none_is_needed():
    assert await owner_seen("/placard/open", authorization="Bearer two") == owner_of("two")
    assert await owner_seen("/placard/open", authorization="Bearer three") == owner_of(None)


def cookie(key):
    return key_cookie("placard_key", key, "/placard", False).partition(";")[0]


async def test_a_key_in_the_cookie_counts_below_the_path_alone():
    assert await owner_seen("/placard/labels", cookie=cookie("two")) == owner_of("two")
    assert await owner_seen("/placard/labels", cookie=f"other=1; {cookie('two')}") == owner_of("two")
    assert await owner_seen("/v1/models", cookie=cookie("two")) == 401
    assert await owner_seen("/placard/labels", cookie=cookie("three")) == 401
    assert await owner_seen("/placard/labels", cookie="placard_key") == 401


@pytest.mark.parametrize(
    ("origin", "counts"),
    [
        (f"http://{HOST}", True),
        (f"https://{HOST}", True),
        ("http://there:8000", False),
        ("http://here:3000", False),
        ("null", False),
        (None, False),
    ],
)
async def test_a_cookie_changes_something_for_pages_of_this_server_alone(origin, counts):
    headers = {"cookie": cookie("two")} | ({"origin": origin} if origin else {})
    wanted = owner_of("two") if counts else 401
    for method in ("POST", "DELETE"):
        assert await owner_seen("/placard/labels", method, **headers) == wanted


async def test_the_header_goes_before_the_cookie():
    assert await owner_seen("/placard/labels", cookie=cookie("two"), authorization="Bearer one") == owner_of(
        "one"
    )
    assert await owner_seen("/placard/labels", cookie=cookie("two"), authorization="Bearer 3") == 401


@pytest.mark.parametrize("key", ["plain", 'with; and, "quotes" = spaces', "ключ"])
async def test_any_key_fits_into_a_cookie(key):
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/placard/x",
        "headers": [(b"cookie", cookie(key).encode())],
    }
    assert BESIDE.shown_key(scope) == key


def test_a_cookie_is_for_no_script_and_no_other_site():
    plain = key_cookie("placard_key", "k", "/placard", secure=False)
    assert plain == "placard_key=k; Path=/placard; HttpOnly; SameSite=Strict"
    assert key_cookie("placard_key", "k", "/placard", secure=True) == f"{plain}; Secure"


def test_an_application_can_tell_who_has_shown_a_key():
    assert shows_key(Request({"type": "http", "owner": owner_of("one")}))
    assert not shows_key(Request({"type": "http", "owner": owner_of(None)}))
