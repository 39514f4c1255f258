"""Websockets at the door: keys in either form, pages that may connect, codes of refusals."""

import pytest

from mmserve.core.errors import Overloaded, Unauthorized
from mmserve.server.errors import Stopping
from mmserve.server.socket_door import (
    OriginRefused,
    check_origin,
    close_code,
    fitting,
    origins_of,
    shown_key,
    subprotocol,
)


def scope(subprotocols=(), **headers):
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "websocket", "headers": raw, "subprotocols": list(subprotocols)}


def test_a_key_comes_in_the_header_or_among_the_subprotocols():
    assert shown_key(scope(authorization="Bearer abc")) == "abc"
    assert shown_key(scope(["realtime", "openai-insecure-api-key.abc"])) == "abc"
    assert shown_key(scope(["realtime"], authorization="Basic abc")) is None


def test_a_key_is_never_the_subprotocol_that_is_spoken():
    assert subprotocol(["openai-insecure-api-key.abc"]) is None
    assert subprotocol(["openai-insecure-api-key.abc", "realtime"]) == "realtime"
    assert subprotocol(["realtime", "mmserve.frames.v1"]) == "mmserve.frames.v1"


@pytest.mark.parametrize(
    ("origin", "allowed", "keyed", "fine"),
    [
        (None, (), False, True),
        ("https://example.org", (), True, True),
        ("https://example.org", (), False, False),
        ("http://cam.local:8000", (), False, True),
        ("http://localhost:3000", (), False, True),
        ("http://127.0.0.1:3000", (), False, True),
        ("null", (), False, False),
        ("https://example.org", ("https://example.org",), False, True),
        ("http://localhost:3000", ("https://example.org",), True, False),
        ("https://any.where", ("*",), False, True),
        ("http://[", (), False, False),
    ],
)
def test_pages_that_may_connect(origin, allowed, keyed, fine):
    headers = {"host": "cam.local:8000"} | ({} if origin is None else {"origin": origin})
    if fine:
        check_origin(scope(**headers), allowed, keyed)
    else:
        with pytest.raises(OriginRefused):
            check_origin(scope(**headers), allowed, keyed)


def test_several_sites_stand_in_one_option():
    assert origins_of(None) == ()
    assert origins_of("https://a.org/, https://b.org") == ("https://a.org", "https://b.org")


def test_codes_say_what_kind_of_refusal_it_was():
    assert close_code(Unauthorized("no")) == 4401
    assert close_code(Overloaded("full")) == 1013
    assert close_code(Stopping("soon")) == 1001
    assert close_code(OriginRefused("no")) == 1008


def test_a_reason_fits_a_close_frame_in_whole_characters():
    assert fitting("short") == "short"
    assert fitting("é" * 100) == "é" * 60
