"""Which hosts and addresses a media URL may lead to."""

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import httpx

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError

FORBIDDEN = "media_url_forbidden"
UNREACHABLE = "media_unreachable"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# What Python's registry calls global in some of its versions, and is not for anybody to ask for: protocol
# assignments (a cloud's metadata service answers in there), relays to 6to4, another metadata service,
# documentation.
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20"))
)
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Threads of their own: those that read data URLs and files must not wait for somebody's name server.
_LOOKUPS = ThreadPoolExecutor(32, thread_name_prefix="lookup")


@dataclass(frozen=True)
class AddressRule:
    """Where fetching may lead: to public addresses unless ``allow_private``, and to hosts of ``domains``
    alone if there are any."""

    allow_private: bool = False
    domains: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: MediaOptions) -> "AddressRule":
        listed = (options.fetch_domains or "").lower().split(",")
        return cls(options.allow_private_urls, tuple(name.strip() for name in listed if name))

    async def resolve(self, url: httpx.URL) -> tuple[tuple[str, ...], int]:
        """Look a URL's host up once: (the numeric addresses to connect to, port).

        MediaError when the URL is not plain http(s), its host is not on the list or has no address, or any
        address of the host is not public. Every spelling of an address ends here as the number it stands for.
        """
        _check_form(url)
        host, port = url.raw_host.decode("ascii"), url.port or default_port(url)
        return await self.numbers(host, port), port

    async def numbers(self, host: str, port: int) -> tuple[str, ...]:
        """The numeric addresses of ``host``, looked up once; MediaError as for ``resolve``."""
        self._check_domain(host)
        numbers = await _look_up(host, port)
        if not self.allow_private and not all(is_public(ipaddress.ip_address(n)) for n in numbers):
            raise MediaError(
                "the URL leads to an address that is not public; these are not fetched", code=FORBIDDEN
            )
        return numbers

    def _check_domain(self, host: str) -> None:
        name = host.lower().removesuffix(".")
        if self.domains and not any(name == d or name.endswith(f".{d}") for d in self.domains):
            raise MediaError(
                f"URLs are fetched from {', '.join(self.domains)} and their sub-domains only", code=FORBIDDEN
            )


def is_public(address: Address) -> bool:
    """Whether an address is one that anybody on the internet could have asked for.

    IPv4 addresses inside IPv6 ones (mapped, 6to4, Teredo, NAT64) are looked at themselves.
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = _embedded(address)
        if inner:
            return all(is_public(i) for i in inner)
        if address.scope_id or address not in _GLOBAL_UNICAST:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not address.is_reserved
        and not address.is_unspecified
        and not any(address in network for network in _NOT_PUBLIC)
    )


def default_port(url: httpx.URL) -> int:
    return 443 if url.scheme == "https" else 80


async def _look_up(host: str, port: int) -> tuple[str, ...]:
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, look_up)
    except (OSError, UnicodeError):
        raise MediaError(f"the URL's host cannot be found: {host[:100]}", code=UNREACHABLE) from None
    return tuple(dict.fromkeys(str(info[4][0]) for info in found))


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
