"""The address guard, against listeners that must see nothing, and fetching over real sockets."""

import asyncio
import gzip
import ipaddress
import socket
import ssl
import time
from contextlib import asynccontextmanager

import httpx
import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.core.config import MediaOptions
from mmserve.core.errors import ConfigError, MediaError, MediaTimeout, Overloaded
from mmserve.preprocess import address
from mmserve.preprocess.address import AddressRule, is_public
from mmserve.preprocess.source import Fetcher

DATA = bytes(range(256))
OK = b"HTTP/1.1 200 OK\r\n\r\n"
PRIVATE = MediaOptions(allow_private_urls=True)


async def fetch(url, media, param=None, **trust):
    async with Fetcher(media, **trust) as fetcher:
        return await fetcher.fetch(url, param)


# ---------------------------------------------------------------- addresses

REFUSED = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "0.1.2.3", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "168.63.129.16", "192.0.0.192", "192.88.99.1",
    "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.51.100.1", "203.0.113.1",
    "::", "::1", "fe80::1", "fec0::1", "fc00::1", "fd00:ec2::254", "fd20:ce::254", "ff02::1", "ff0e::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1", "2002:7f00:1::", "2002:a9fe:a9fe::", "2001:0:7f00:1::", "2001:db8::1", "3fff::1",
    "100::1", "4000::1", "fe80::1%1",
]  # fmt: skip


@pytest.mark.parametrize("number", REFUSED)
def test_addresses_that_are_not_public(number):
    assert not is_public(ipaddress.ip_address(number))


@pytest.mark.parametrize("number", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses(number):
    assert is_public(ipaddress.ip_address(number))


@pytest.fixture
def listener():
    """A socket on loopback that nobody may connect to."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    yield server
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "localhost", "localhost.", "LOCALHOST", "2130706433", "0x7f000001", "0X7F000001",
        "0x7f.1", "127.1", "127.0.1", "0177.0.0.1", "017700000001", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]",
        "[::1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]", "0.0.0.0", "0", "[::]", "user@127.0.0.1",
        "user:pass@127.0.0.1", "example.com@127.0.0.1", "127.0.0.1.", "%31%32%37.0.0.1", "①②⑦.0.0.1",
        "127。0。0。1", "127.0.0.1%00.example.com", "127.0.0.1\t", "[fe80::1%25lo]", "ⓛocalhost",
    ],
)  # fmt: skip
async def test_no_spelling_of_loopback_is_connected_to(listener, options, host):
    port = listener.getsockname()[1]
    with pytest.raises(MediaError):
        await fetch(f"http://{host}:{port}/a.png", options)


def _byte(value, form):
    return {"decimal": f"{value}", "hex": f"0x{value:x}", "octal": f"0{value:o}"}[form]


PRIVATE_NETWORKS = ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16")


@st.composite
def private_hosts(draw):
    """An IPv4 address that is not public, written in any way that a resolver understands."""
    network = ipaddress.ip_network(draw(st.sampled_from(PRIVATE_NETWORKS)))
    number = int(network[0]) + draw(st.integers(0, network.num_addresses - 1))
    if draw(st.booleans()):
        prefix = draw(st.sampled_from(["::ffff:", "64:ff9b::", "::"]))
        return f"[{prefix}{ipaddress.IPv4Address(number)}]"
    count = draw(st.integers(1, 4))
    shifts = [24, 16, 8][: count - 1]
    parts = [number >> shift & 255 for shift in shifts] + [number & (1 << 8 * (5 - count)) - 1]
    forms = st.sampled_from(["decimal", "hex", "octal"])
    return ".".join(_byte(part, draw(forms)) for part in parts)


@given(private_hosts())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_every_spelling_of_a_private_address_is_refused(host):
    with pytest.raises((MediaError, httpx.InvalidURL)) as caught:
        asyncio.run(AddressRule().resolve(httpx.URL(f"http://{host}/")))
    assert getattr(caught.value, "code", "media_url_forbidden") == "media_url_forbidden"


@given(st.text(max_size=60))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_any_text_after_http_is_an_error_and_no_fault(text):
    closed = MediaOptions(fetch_domains="nowhere.invalid")
    with pytest.raises(MediaError):
        asyncio.run(fetch("http://" + text, closed))


async def test_the_address_checked_is_the_address_connected_to(listener, options, monkeypatch):
    """A name that is private when it is looked up first and public ever after is refused by the first."""
    asked = answers(monkeypatch, lambda: "203.0.113.5" if len(asked) > 1 else "127.0.0.1")
    with pytest.raises(MediaError, match="not public"):
        await fetch(f"http://rebind.test:{listener.getsockname()[1]}/", options)
    assert asked == ["rebind.test"]


async def test_a_name_is_looked_up_once_for_check_and_connection(monkeypatch):
    """A name that leads elsewhere from its second look-up on is never looked up a second time."""
    async with site() as port:
        asked = answers(monkeypatch, lambda: "127.0.0.1" if len(asked) == 1 else "203.0.113.5")
        assert await fetch(f"http://rebind.test:{port}/", PRIVATE) == DATA
        assert asked == ["rebind.test"]


async def test_one_private_address_among_public_ones_is_refused(options, monkeypatch):
    answers(monkeypatch, lambda: ["93.184.216.34", "10.0.0.1"])
    with pytest.raises(MediaError, match="not public"):
        await fetch("http://mixed.test/", options)


def answers(monkeypatch, number):
    """Names are looked up by ``number()``: one address or several; what was asked is returned."""
    asked = []

    def lookup(host, port, **kwargs):
        asked.append(host)
        found = number()
        found = [found] if isinstance(found, str) else found
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (n, port)) for n in found]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return asked


# ---------------------------------------------------------------- the list of domains


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("example.org", True), ("EXAMPLE.org", True), ("example.org.", True), ("a.b.example.org", True),
        ("badexample.org", False), ("example.org.evil.test", False), ("example.com", False),
        ("93.184.216.34", False), ("images.test", True), ("xn--bcher-kva.test", True), ("bücher.test", True),
    ],
)  # fmt: skip
async def test_domains_and_their_sub_domains_alone(monkeypatch, host, allowed):
    answers(monkeypatch, lambda: "93.184.216.34")
    listed = MediaOptions(fetch_domains="example.org, Images.test,xn--bcher-kva.test")
    asked = AddressRule.of(listed).resolve(httpx.URL(f"http://{host}/"))
    if allowed:
        assert await asked == (("93.184.216.34",), 80)
    else:
        with pytest.raises(MediaError, match=r"example\.org, images\.test"):
            await asked


@pytest.mark.parametrize("domains", ["http://a.b", "*.a.b", "a,,b", ".a", "a.b/c"])
def test_a_list_that_is_none_is_refused_at_once(domains):
    with pytest.raises(ConfigError, match="fetch_domains"):
        MediaOptions(fetch_domains=domains)


async def test_a_listed_host_that_redirects_off_the_list_ends_there():
    async with site() as port:
        media = MediaOptions(allow_private_urls=True, fetch_domains="localhost")
        assert await fetch(f"http://localhost:{port}/", media) == DATA
        async with site() as other:
            with pytest.raises(MediaError, match="localhost and their sub-domains only"):
                await fetch(f"http://localhost:{port}/to/http://127.0.0.1:{other}/", media)
            assert site.seen[other] == []


async def test_every_hop_is_checked(monkeypatch):
    """The first address counts as public here, the one it redirects to does not."""
    monkeypatch.setattr(address, "is_public", lambda number: str(number) == "127.0.0.2")
    async with site("127.0.0.2") as port, site() as other:
        with pytest.raises(MediaError, match="not public"):
            await fetch(f"http://127.0.0.2:{port}/to/http://127.0.0.1:{other}/", MediaOptions())
        assert len(site.seen[port]) == 1
        assert site.seen[other] == []


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://a/", "data:,x", "gopher://a/", "//user@a/"])
async def test_redirects_to_other_schemes_end_there(target):
    async with site() as port:
        with pytest.raises(MediaError) as caught:
            await fetch(f"http://127.0.0.1:{port}/to/{target}", PRIVATE)
        assert caught.value.code in ("media_url_forbidden", "media_unreachable")
        assert len(site.seen[port]) == 1


# ---------------------------------------------------------------- fetching


@asynccontextmanager
async def site(host="127.0.0.1", tls=None):
    """The port of a server that says what the path asks for; ``site.seen[port]`` are the heads it got."""

    async def serve(reader, writer):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            site.seen[port].append(head)
            await respond(head.split()[1], writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    site.seen[port] = []
    try:
        yield port
    finally:
        server.close()


site.seen = {}


async def respond(path, writer):
    name, _, rest = path[1:].partition("/")
    if name == "to":
        writer.write(f"HTTP/1.1 302 Found\r\nLocation: {rest}\r\n\r\n".encode())
    elif name == "missing":
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
    elif name == "announced":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1099511627776\r\n\r\n")
    elif name == "short":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + DATA)
    elif name == "gzip":
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(bytes(1 << 20)))
    elif name == "headers":
        writer.write(
            b"HTTP/1.1 200 OK\r\n" + b"".join(b"x-%d: %s\r\n" % (i, DATA.hex().encode()) for i in range(1000))
        )
    elif name == "nonsense":
        writer.write(b"SSH-2.0-OpenSSH\r\n" * 3)
    elif name == "silent":
        writer.write(OK + DATA)
        await writer.drain()
        await asyncio.sleep(30)
    elif name == "trickle":
        writer.write(OK)
        for _ in range(600):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)
    else:
        writer.write(OK + DATA * (100 if name == "endless" else 1))


async def test_fetches_and_follows_redirects():
    async with site() as port:
        assert await fetch(f"http://127.0.0.1:{port}/ok", PRIVATE) == DATA
        assert await fetch(f"http://127.0.0.1:{port}/to//ok", PRIVATE) == DATA
        assert await fetch(f"HTTP://localhost:{port}/ok?a=b#c", PRIVATE) == DATA
        head = site.seen[port][-1]
        assert head.startswith("GET /ok?a=b HTTP/1.1\r\n")
        assert f"host: localhost:{port}\r\n" in head.lower()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("missing", "404"),
        ("to/to/to/to/to/to/to/ok", "redirects"),
        ("announced", "allowed"),
        ("endless", "allowed"),
        ("gzip", "compressed"),
        ("headers", "cannot be fetched"),
        ("nonsense", "cannot be fetched"),
        ("short", "cannot be fetched"),
    ],
)
async def test_answers_that_are_no_media(path, said):
    small = MediaOptions(allow_private_urls=True, max_image_bytes=1000)
    async with site() as port:
        path = path if path[:3] != "to/" else "to/" + f"http://127.0.0.1:{port}/to/" * 6 + "ok"
        with pytest.raises(MediaError, match=said):
            await fetch(f"http://127.0.0.1:{port}/{path}", small)


@pytest.mark.parametrize(
    ("path", "limits", "said"),
    [
        ("silent", {"fetch_idle_s": 0.2}, "silent for 0.2 s"),
        ("trickle", {"fetch_timeout_s": 0.5}, "in full within 0.5 s"),
    ],
)
async def test_silence_and_trickling_are_limited(path, limits, said):
    async with site() as port:
        with pytest.raises(MediaTimeout, match=said) as caught:
            await fetch(
                f"http://127.0.0.1:{port}/{path}", MediaOptions(allow_private_urls=True, **limits), param="p"
            )
    assert (caught.value.status, caught.value.param) == (504, "p")


async def test_a_host_that_accepts_and_says_nothing_is_limited():
    with socket.create_server(("127.0.0.1", 0)) as mute:
        media = MediaOptions(allow_private_urls=True, fetch_idle_s=0.2)
        with pytest.raises(MediaTimeout):
            await fetch(f"http://127.0.0.1:{mute.getsockname()[1]}/", media)


async def test_fetches_at_once_are_limited():
    media = MediaOptions(allow_private_urls=True, max_fetches=1, fetch_timeout_s=0.4)
    async with site() as port, Fetcher(media) as fetcher:
        slow = asyncio.create_task(fetcher.fetch(f"http://127.0.0.1:{port}/trickle"))
        await asyncio.sleep(0.1)
        begun = time.monotonic()
        assert await fetcher.fetch(f"http://127.0.0.1:{port}/ok") == DATA  # once the slow one is given up
        assert time.monotonic() - begun > 0.1
        with pytest.raises(MediaTimeout):
            await slow


async def test_who_waits_too_long_for_a_place_is_told_to_come_back():
    media = MediaOptions(allow_private_urls=True, max_fetches=1, fetch_timeout_s=0.4)
    async with site() as port, Fetcher(media) as fetcher:
        url = f"http://127.0.0.1:{port}/trickle"
        slow = [asyncio.create_task(fetcher.fetch(url)) for _ in range(3)]
        said = [type(e) for e in await asyncio.gather(*slow, return_exceptions=True)]
    assert said[0] is MediaTimeout
    assert Overloaded in said


async def test_the_next_address_of_a_host_is_tried(monkeypatch):
    async with site("127.0.0.2") as port:
        answers(monkeypatch, lambda: ["127.0.0.1", "127.0.0.2"])
        assert await fetch(f"http://two.test:{port}/", PRIVATE) == DATA


async def test_closed_ports_and_unknown_hosts_have_their_own_messages(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(MediaError, match="refuses"):
        await fetch(f"http://127.0.0.1:{port}/", PRIVATE)

    def unknown(*args, **kwargs):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(MediaError, match="cannot be found"):
        await fetch("http://no-such-host.invalid/", PRIVATE)


async def test_slow_name_servers_do_not_hold_up_data_urls(options, monkeypatch):
    import threading

    answered = threading.Event()

    def lookup(host, port, **kwargs):
        answered.wait(30)
        raise OSError("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    async with Fetcher(options) as fetcher:
        slow = [asyncio.create_task(fetcher.fetch(f"http://slow{i}.test/")) for i in range(40)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(fetcher.fetch("data:;base64," + "A" * (1 << 20)), 20)
        answered.set()
        assert all(isinstance(e, MediaError) for e in await asyncio.gather(*slow, return_exceptions=True))


@pytest.mark.parametrize("url", ["http://", "http:///a", "http://[::1", "http://a:99999/", "http://a b/"])
async def test_broken_urls_are_refused(url):
    with pytest.raises(MediaError):
        await fetch(url, PRIVATE)


async def test_fetching_can_be_switched_off():
    async with site() as port:
        with pytest.raises(MediaError, match="switched off"):
            await fetch(f"http://127.0.0.1:{port}/ok", MediaOptions(fetch_urls=False))
        assert site.seen[port] == []


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def server_context(authority, *names):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*names).configure_cert(context)
    return context


def trust(*authorities):
    context = ssl.create_default_context()
    for authority in authorities:
        authority.configure_trust(context)
    return context


async def test_the_name_is_asked_for_and_proved_though_the_number_is_connected_to(authority, monkeypatch):
    """Two names at one number, a certificate each: the right one comes by SNI, and only it is believed."""
    answers(monkeypatch, lambda: "127.0.0.1")
    asked, contexts = [], {name: server_context(authority, name) for name in ("one.test", "two.test")}

    def choose(connection, name, context):
        asked.append(name)
        connection.context = contexts[name]

    front = server_context(authority, "front.test")
    front.sni_callback = choose
    async with site(tls=front) as port, Fetcher(PRIVATE, verify=trust(authority)) as fetcher:
        for name in ("one.test", "two.test", "one.test."):
            assert await fetcher.fetch(f"https://{name}:{port}/") == DATA
    assert asked == ["one.test", "two.test", "one.test"]


@pytest.mark.parametrize("names", [("other.test",), ("127.0.0.1",)])
async def test_a_certificate_for_another_name_is_refused(authority, monkeypatch, names):
    answers(monkeypatch, lambda: "127.0.0.1")
    async with site(tls=server_context(authority, *names)) as port:
        with pytest.raises(MediaError, match=r"no valid TLS certificate.*one\.test"):
            await fetch(f"https://one.test:{port}/", PRIVATE, verify=trust(authority))
        assert site.seen[port] == []


async def test_a_certificate_for_the_number_itself_serves_the_number(authority):
    async with site(tls=server_context(authority, "127.0.0.1")) as port:
        assert await fetch(f"https://127.0.0.1:{port}/", PRIVATE, verify=trust(authority)) == DATA


async def test_a_proof_of_one_name_does_not_serve_another_at_the_same_number(authority, monkeypatch):
    answers(monkeypatch, lambda: "127.0.0.1")
    async with (
        site(tls=server_context(authority, "one.test")) as port,
        Fetcher(PRIVATE, verify=trust(authority)) as fetcher,
    ):
        assert await fetcher.fetch(f"https://one.test:{port}/") == DATA
        with pytest.raises(MediaError, match="TLS certificate"):
            await fetcher.fetch(f"https://two.test:{port}/")


async def test_unknown_authorities_and_plain_text_are_told_apart(authority):
    async with site(tls=server_context(authority, "127.0.0.1")) as port:
        with pytest.raises(MediaError, match="no valid TLS certificate: unable"):
            await fetch(f"https://127.0.0.1:{port}/", PRIVATE)
    plain = await asyncio.start_server(lambda _, writer: writer.write(OK), "127.0.0.1", 0)
    with pytest.raises(MediaError, match="does not speak TLS"):
        await fetch(f"https://127.0.0.1:{plain.sockets[0].getsockname()[1]}/", PRIVATE)
    plain.close()
