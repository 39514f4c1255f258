"""References to media (data, http and file URLs) to bytes.

Nothing of a reference's content is ever repeated in an error.
"""

import asyncio
import base64
import binascii
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError, MediaTimeout
from mmserve.preprocess.address import FORBIDDEN, checked_address, default_port
from mmserve.preprocess.media import naming

Kind = Literal["image", "video"]

MAX_REDIRECTS = 5
REDIRECTS = (301, 302, 303, 307, 308)
HEADERS = {"user-agent": "mmserve", "accept": "*/*", "accept-encoding": "identity"}


async def fetch(ref: str, media: MediaOptions, param: str | None = None, kind: Kind = "image") -> bytes:
    """The bytes behind a data, http(s) or file URL.

    MediaError for what is not allowed, not there or too large; MediaTimeout for what is too slow. Both
    carry ``param``.
    """
    with naming(param):
        scheme = ref[:8].split(":", 1)[0].strip().lower()
        if scheme == "data":
            return await asyncio.to_thread(decode_data_url, ref, _limit(media, kind))
        if scheme in ("http", "https"):
            return await _fetch_http(ref.strip(), media, _limit(media, kind))
        if scheme == "file":
            return await asyncio.to_thread(_read_file_url, ref, media, _limit(media, kind))
        raise MediaError("media must be given as a data:, http://, https:// or file:// URL")


def _limit(media: MediaOptions, kind: Kind) -> int:
    return media.max_image_bytes if kind == "image" else media.max_video_bytes


def _too_large(limit: int) -> MediaError:
    return MediaError(f"the media has more than {limit} bytes, the most that is allowed")


# ---------------------------------------------------------------- data URLs


def decode_data_url(ref: str, limit: int) -> bytes:
    """The content of a data URL (RFC 2397). No type, parameters, white space, either alphabet: all pass."""
    head, comma, body = ref.strip().partition(",")
    if not comma or head[:5].lower() != "data:":
        raise MediaError("the data URL has no comma between its type and its content")
    if len(body) > 4 * limit + 1024:
        raise _too_large(limit)
    encoded = head[5:].split(";")[-1].strip().lower() == "base64"
    data = decode_base64(body) if encoded else unquote_to_bytes(body)
    if len(data) > limit:
        raise _too_large(limit)
    if not data:
        raise MediaError("the data URL is empty")
    return data


def decode_base64(text: str) -> bytes:
    """Base64 in either alphabet, percent-encoded or not, with white space, with or without padding."""
    if "%" in text:
        text = unquote(text)
    try:
        raw = "".join(text.split()).translate(_URL_SAFE).rstrip("=").encode("ascii")
        return base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError):
        raise MediaError("the content is not valid base64") from None


_URL_SAFE = str.maketrans("-_", "+/")


# ---------------------------------------------------------------- http


async def _fetch_http(url: str, media: MediaOptions, limit: int) -> bytes:
    if not media.fetch_urls:
        raise MediaError("fetching URLs is switched off; send the media as a data URL", code=FORBIDDEN)
    try:
        async with asyncio.timeout(media.fetch_timeout_s):
            return await _follow(httpx.URL(url), media, limit)
    except (TimeoutError, httpx.TimeoutException):
        raise MediaTimeout(f"the URL did not answer in full within {media.fetch_timeout_s:g} s") from None
    except httpx.ConnectError as error:
        raise MediaError(_connect_reason(error), code="media_unreachable") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MediaError(
            f"the URL cannot be fetched: {type(error).__name__}", code="media_unreachable"
        ) from None


def _connect_reason(error: Exception) -> str:
    if "certificate" in str(error).lower() or "ssl" in str(error).lower():
        return "the URL's host has no valid TLS certificate"
    return "the URL's host refuses the connection"


async def _follow(url: httpx.URL, media: MediaOptions, limit: int) -> bytes:
    """Fetch, following redirects by hand: every hop is checked before anything is sent to it."""
    for _ in range(MAX_REDIRECTS + 1):
        address, port = await checked_address(url, allow_private=media.allow_private_urls)
        timeout = httpx.Timeout(media.fetch_timeout_s)
        async with (
            httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=timeout) as client,
            client.stream("GET", **_pinned(url, address, port)) as answer,
        ):
            if answer.status_code not in REDIRECTS:
                return await _body(answer, limit)
            url = url.join(answer.headers.get("location", ""))
    raise MediaError(f"the URL redirects more than {MAX_REDIRECTS} times", code="media_unreachable")


def _pinned(url: httpx.URL, address: str, port: int) -> dict[str, Any]:
    """A request for ``url`` that connects to ``address``, with the host's name where it is checked."""
    host = url.raw_host.decode("ascii")
    name = f"[{host}]" if ":" in host else host
    return {
        "url": url.copy_with(host=address, port=port, fragment=None),
        "headers": {**HEADERS, "host": name if port == default_port(url) else f"{name}:{port}"},
        "extensions": {"sni_hostname": host},
    }


async def _body(answer: httpx.Response, limit: int) -> bytes:
    if answer.status_code != 200:
        raise MediaError(f"the URL answered with status {answer.status_code}", code="media_unreachable")
    length = answer.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    data = bytearray()
    async for chunk in answer.aiter_bytes(1 << 16):
        data += chunk
        if len(data) > limit:
            raise _too_large(limit)
    return bytes(data)


# ---------------------------------------------------------------- files


def _read_file_url(ref: str, media: MediaOptions, limit: int) -> bytes:
    """A file under the media root; the refusal is the same whether the file is elsewhere or nowhere."""
    refusal = "file URLs may only name readable files under the server's media root"
    parts = urlsplit(ref.strip())
    if media.media_root is None or parts.netloc.lower() not in ("", "localhost"):
        raise MediaError(refusal, code=FORBIDDEN)
    try:
        root = Path(media.media_root).resolve(strict=True)
        path = Path(unquote(parts.path)).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise MediaError(refusal, code=FORBIDDEN) from None
    if not path.is_relative_to(root):
        raise MediaError(refusal, code=FORBIDDEN)
    return _read(path, limit, refusal)


def _read(path: Path, limit: int, refusal: str) -> bytes:
    try:
        if not path.is_file():
            raise MediaError(refusal)
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except (OSError, ValueError):
        raise MediaError(refusal) from None
    if len(data) > limit:
        raise _too_large(limit)
    return data
