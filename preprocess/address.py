"""Which addresses a media URL may lead to."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx

from mmserve.core.errors import MediaError

FORBIDDEN = "media_url_forbidden"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Globally routable by the registry, yet a cloud provider's metadata service answers there.
METADATA = {ipaddress.ip_address("168.63.129.16")}
# Threads of their own: those that read data URLs and files must not wait for somebody's name server.
_LOOKUPS = ThreadPoolExecutor(32, thread_name_prefix="lookup")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether an address is one that anybody on the internet could have asked for.

    IPv4 addresses inside IPv6 ones (mapped, 6to4, Teredo, NAT64) are looked at themselves.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner:
            return all(is_public(i) for i in inner)
        if address.scope_id:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and address not in METADATA
    )


async def checked_address(url: httpx.URL, *, allow_private: bool) -> tuple[str, int]:
    """Look a URL's host up once: (the numeric address to connect to, port).

    MediaError when the URL is not plain http(s), its host has no address, or any address of the host is
    not public. Every spelling of an address ends here as the number it stands for.
    """
    _check_form(url)
    host, port = url.raw_host.decode("ascii"), url.port or default_port(url)
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, look_up)
    except (OSError, UnicodeError):
        raise MediaError(f"the URL's host cannot be found: {host[:100]}", code="media_unreachable") from None
    numbers = [str(info[4][0]) for info in found]
    if not allow_private and not all(is_public(ipaddress.ip_address(n)) for n in numbers):
        raise MediaError(
            "the URL leads to an address that is not public; these are not fetched", code=FORBIDDEN
        )
    return numbers[0], port


def default_port(url: httpx.URL) -> int:
    return 443 if url.scheme == "https" else 80


def _check_form(url: httpx.URL) -> None:
    if url.scheme not in ("http", "https"):
        raise MediaError(f"URLs must begin with http:// or https://, not {url.scheme[:20]!r}", code=FORBIDDEN)
    if url.userinfo:
        raise MediaError("URLs with a user name are not fetched", code=FORBIDDEN)
    if not url.raw_host:
        raise MediaError("the URL has no host", code=FORBIDDEN)


def _embedded(address: ipaddress.IPv6Address) -> list[Address]:
    if address.ipv4_mapped:
        return [address.ipv4_mapped]
    if address.sixtofour:
        return [address.sixtofour]
    if address.teredo:
        return list(address.teredo)
    if address in _NAT64:
        return [ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)]
    return []
