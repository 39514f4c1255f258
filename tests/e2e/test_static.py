"""What browsers are given: the client and its page, which any page may import and no key guards."""

import http.client

import httpx
import pytest
from fake_service import FakeService
from live_server import serving

from mmserve.core.config import Config


@pytest.fixture(scope="module")
def url():
    with serving(FakeService(), Config.of(api_key="k" * 20)) as url:
        yield url


@pytest.mark.parametrize(
    ("name", "kind", "holds"),
    [("live.js", "text/javascript", "export class LiveCamera"), ("live.html", "text/html", "./live.js")],
)
def test_the_client_and_its_page_need_no_key(url, name, kind, holds):
    answer = httpx.get(f"{url}/static/{name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert holds in answer.text


@pytest.mark.parametrize(
    "path", ["/static/app.py", "/static/..%2fapp.py", "/static/../app.py", "/static/../v1/models", "/static/"]
)
def test_nothing_else_is_there(url, path):
    connection = http.client.HTTPConnection(url.removeprefix("http://"))  # which sends paths as they are
    connection.request("GET", path)
    assert connection.getresponse().status == 404


def test_everything_else_still_asks_for_the_key(url):
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/staticfiles").status_code == 401
