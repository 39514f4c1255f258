"""Data URLs, the address guard against a listener that must see nothing, fetching, files."""

import asyncio
import base64
import http.server
import ipaddress
import socket
import threading
import time

import pytest

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError, MediaTimeout
from mmserve.preprocess.address import is_public
from mmserve.preprocess.source import decode_base64, fetch

DATA = bytes(range(256))
PRIVATE = MediaOptions(allow_private_urls=True)


def load_source(ref, media, param=None, kind="image"):
    return asyncio.run(fetch(ref, media, param, kind))


# ---------------------------------------------------------------- data URLs


def encoded(data=DATA):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    "ref",
    [
        f"data:image/png;base64,{encoded()}",
        f"DATA:IMAGE/PNG;Base64,{encoded()}",
        f"data:;base64,{encoded()}",
        f"data:image/png;name=a.png;charset=utf-8;base64,{encoded()}",
        f"  data:image/png;base64, {encoded()[:40]}\n{encoded()[40:]} ",
        f"data:image/png;base64,{encoded().rstrip('=')}",
        f"data:image/png;base64,{base64.urlsafe_b64encode(DATA).decode()}",
        f"data:image/png;base64,{encoded().replace('+', '%2B').replace('/', '%2f').replace('=', '%3D')}",
        "data:application/octet-stream," + "".join(f"%{b:02x}" for b in DATA),
    ],
)
def test_data_urls_in_every_spelling(options, ref):
    assert load_source(ref, options) == DATA


@pytest.mark.parametrize(
    "ref",
    [
        "data:image/png;base64",
        "data:image/png;base64,",
        "data:;base64,abcde",
        "data:;base64,§§§§",
        "data:;base64,a",
    ],
)
def test_broken_data_urls_name_the_part_and_not_the_content(options, ref):
    with pytest.raises(MediaError) as caught:
        load_source(ref, options, param="messages[0].content[1].image_url")
    assert caught.value.param == "messages[0].content[1].image_url"
    assert "abcde" not in caught.value.message


def test_data_urls_are_limited():
    with pytest.raises(MediaError, match="allowed"):
        load_source(f"data:;base64,{encoded(bytes(200))}", MediaOptions(max_image_bytes=100))
    assert load_source(f"data:;base64,{encoded(bytes(200))}", MediaOptions(max_image_bytes=100), kind="video")


def test_raw_base64():
    assert decode_base64(encoded()) == DATA


@pytest.mark.parametrize(
    "ref", ["ftp://a/b", "javascript:1", "hello", "", "C:\\a.png", "gopher://x", "/etc/passwd"]
)
def test_other_schemes_are_refused(options, ref):
    with pytest.raises(MediaError, match="data:"):
        load_source(ref, options)


# ---------------------------------------------------------------- addresses

REFUSED = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.100.100.200", "168.63.129.16", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1",
    "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", REFUSED)
def test_addresses_that_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(address):
    assert is_public(ipaddress.ip_address(address))


@pytest.fixture
def listener():
    """A socket on loopback that counts who connects."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    yield server
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "localhost.", "LOCALHOST", "2130706433", "0x7f000001", "0x7f.1", "127.1",
        "0177.0.0.1", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::1]", "0.0.0.0", "0", "user@127.0.0.1",
        "user:pass@127.0.0.1", "example.com@127.0.0.1", "127.0.0.1.", "%31%32%37.0.0.1", "①②⑦.0.0.1",
    ],
)  # fmt: skip
async def test_no_spelling_of_loopback_is_connected_to(listener, options, host):
    port = listener.getsockname()[1]
    with pytest.raises(MediaError):
        await fetch(f"http://{host}:{port}/a.png", options)


async def test_the_address_checked_is_the_address_connected_to(listener, options, monkeypatch):
    """A name that is public when it is looked up first and private ever after."""
    asked = []

    def lookup(host, port, **kwargs):
        asked.append(host)
        number = "203.0.113.5" if len(asked) > 1 else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (number, port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    with pytest.raises(MediaError, match="not public"):
        await fetch(f"http://rebind.test:{listener.getsockname()[1]}/", options)
    assert asked == ["rebind.test"]


# ---------------------------------------------------------------- fetching


class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        port = self.server.server_address[1]
        name, _, rest = self.path[1:].partition("/")
        self.server.seen.append((self.path, self.headers["Host"]))
        if name == "redirect":
            self.send_response(302)
            self.send_header(
                "Location", {"ok": "/ok", "loop": "/redirect/loop"}.get(rest, f"http://{rest}:{port}/ok")
            )
            self.end_headers()
        elif name == "missing":
            self.send_error(404)
        elif name == "slow":
            time.sleep(0.6)
        else:
            self.send_response(200)
            if name == "announced":
                self.send_header("Content-Length", str(1 << 40))
            self.end_headers()
            for _ in range(100 if name == "endless" else 1):
                self.wfile.write(DATA)

    def log_message(self, *args):
        pass


@pytest.fixture
def site():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    server.seen = []
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def url_of(site, path, host="127.0.0.1"):
    return f"http://{host}:{site.server_address[1]}/{path}"


async def test_fetches_and_follows_redirects(site):
    assert await fetch(url_of(site, "ok"), PRIVATE) == DATA
    assert await fetch(url_of(site, "redirect/ok"), PRIVATE) == DATA
    assert await fetch(url_of(site, "ok?a=b#c", "localhost"), PRIVATE) == DATA
    assert site.seen[-1] == ("/ok?a=b", f"localhost:{site.server_address[1]}")


async def test_slow_name_servers_do_not_hold_up_data_urls(options, monkeypatch):
    answered = threading.Event()

    def lookup(host, port, **kwargs):
        answered.wait(10)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    slow = [asyncio.create_task(fetch(f"http://slow{i}.test/", options)) for i in range(40)]
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(fetch(f"data:;base64,{encoded()}", options), 2) == DATA
    answered.set()
    assert all(isinstance(e, MediaError) for e in await asyncio.gather(*slow, return_exceptions=True))


async def test_every_hop_is_checked(site, monkeypatch):
    """The first host passes the check, the one it redirects to does not."""
    from mmserve.preprocess import source

    real = source.checked_address
    hops = []

    async def check(url, *, allow_private):
        hops.append(url)
        return await real(url, allow_private=len(hops) == 1)

    monkeypatch.setattr(source, "checked_address", check)
    with pytest.raises(MediaError, match="not public"):
        await fetch(url_of(site, "redirect/localhost"), MediaOptions())
    assert [path for path, _ in site.seen] == ["/redirect/localhost"]
    assert len(hops) == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [("missing", "404"), ("redirect/loop", "redirects"), ("announced", "allowed"), ("endless", "allowed")],
)
async def test_answers_that_are_no_media(site, path, said):
    small = MediaOptions(allow_private_urls=True, max_image_bytes=1000)
    with pytest.raises(MediaError, match=said):
        await fetch(url_of(site, path), small)


async def test_time_is_limited(site):
    begun = time.monotonic()
    with pytest.raises(MediaTimeout) as caught:
        await fetch(
            url_of(site, "slow"), MediaOptions(allow_private_urls=True, fetch_timeout_s=0.2), param="p"
        )
    assert time.monotonic() - begun < 0.5
    assert (caught.value.status, caught.value.param) == (504, "p")


async def test_closed_ports_and_unknown_hosts_have_their_own_messages(site):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(MediaError, match="refuses"):
        await fetch(f"http://127.0.0.1:{port}/", PRIVATE)
    with pytest.raises(MediaError, match="cannot be found"):
        await fetch("http://no-such-host.invalid/", PRIVATE)
    with pytest.raises(MediaError, match=r"TLS|cannot be fetched"):
        await fetch(url_of(site, "ok").replace("http:", "https:"), PRIVATE)


@pytest.mark.parametrize("url", ["http://", "http:///a", "http://[::1", "http://a:99999/", "http://a b/"])
async def test_broken_urls_are_refused(url):
    with pytest.raises(MediaError):
        await fetch(url, PRIVATE)


async def test_fetching_can_be_switched_off(site):
    with pytest.raises(MediaError, match="switched off"):
        await fetch(url_of(site, "ok"), MediaOptions(fetch_urls=False))
    assert site.seen == []


# ---------------------------------------------------------------- files


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a b.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(DATA)
    (tmp_path / "root" / "link.png").symlink_to(tmp_path / "secret.png")
    return tmp_path / "root"


def test_files_under_the_media_root(root):
    media = MediaOptions(media_root=str(root))
    assert load_source(f"file://{root}/a%20b.png", media) == DATA
    assert load_source(f"file://localhost{root}/a%20b.png", media) == DATA


def test_refusals_do_not_tell_whether_a_file_exists(root):
    media = MediaOptions(media_root=str(root))
    said = set()
    for path in ("link.png", "../secret.png", "../nothing.png", "%2e%2e/secret.png", "no.png", "", "a%00b"):
        with pytest.raises(MediaError) as caught:
            load_source(f"file://{root}/{path}", media)
        said.add(caught.value.message)
    with pytest.raises(MediaError) as caught:
        load_source(f"file://{root}/a%20b.png", MediaOptions())
    assert said == {caught.value.message}
