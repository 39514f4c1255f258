"""References to media (data, http and file URLs) to bytes.

Nothing of a reference's content is ever repeated in an error.
"""

import asyncio
import ssl
from pathlib import Path
from types import TracebackType
from typing import Literal
from urllib.parse import unquote, urlsplit

from mmserve.core.config import MediaOptions
from mmserve.core.errors import MediaError
from mmserve.preprocess.address import FORBIDDEN
from mmserve.preprocess.data_url import decode_data_url, decode_frames, holds_frames, too_large
from mmserve.preprocess.media import naming
from mmserve.preprocess.web import Web

Kind = Literal["image", "video"]
Content = bytes | tuple[bytes, ...]  # a file, or the pictures of a clip, one a frame

AT_ONCE_CHARS = 1 << 17  # what is decoded sooner than a thread is woken


class Fetcher:
    """Finds the bytes behind references, for one event loop; ``close`` it there (or use it as a context).

    ``verify`` says which TLS certificates are trusted, by default those of the public authorities.
    """

    def __init__(self, options: MediaOptions, *, verify: ssl.SSLContext | None = None) -> None:
        self.options = options
        self._verify = verify
        self._web: Web | None = None  # made with the first URL, since loading certificates takes its time

    async def fetch(self, ref: str, param: str | None = None, kind: Kind = "image") -> Content:
        """The bytes behind a data, http(s) or file URL; of a clip they may be pictures, one a frame.

        MediaError for what is not allowed, not there or too large; MediaTimeout for what is too slow. Both
        carry ``param``.
        """
        ref = ref.strip()
        with naming(param):
            scheme = ref[: max(ref.find(":", 0, 8), 0)].lower()
            if scheme == "data":
                return await self._decode(ref, kind)
            if scheme in ("http", "https"):
                return await self._fetch(ref, self._limit(kind))
            if scheme == "file":
                return await asyncio.to_thread(_read_file_url, ref, self.options, self._limit(kind))
            raise MediaError("media must be given as a data:, http://, https:// or file:// URL")

    async def close(self) -> None:
        if self._web is not None:
            await self._web.close()

    async def __aenter__(self) -> "Fetcher":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _decode(self, ref: str, kind: Kind) -> Content:
        if len(ref) <= AT_ONCE_CHARS:
            return self._decoded(ref, kind)
        return await asyncio.to_thread(self._decoded, ref, kind)

    def _decoded(self, ref: str, kind: Kind) -> Content:
        if kind == "video" and holds_frames(ref):
            return decode_frames(ref, self._limit(kind), self.options.max_video_frames)
        return decode_data_url(ref, self._limit(kind))

    async def _fetch(self, url: str, limit: int) -> bytes:
        if self._web is None:
            self._web = Web(self.options, verify=self._verify)
        return await self._web.fetch(url, limit)

    def _limit(self, kind: Kind) -> int:
        return self.options.max_image_bytes if kind == "image" else self.options.max_video_bytes


# ---------------------------------------------------------------- files


def _read_file_url(ref: str, media: MediaOptions, limit: int) -> bytes:
    try:
        with find_file(ref, media).open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        raise _no_file() from None
    if len(data) > limit:
        raise too_large(limit)
    return data


def find_file(ref: str, media: MediaOptions) -> Path:
    """A file under the media root; the refusal is the same whether the file is elsewhere or nowhere."""
    parts = urlsplit(ref)
    if media.media_root is None or parts.netloc.lower() not in ("", "localhost"):
        raise _no_file()
    try:
        root = Path(media.media_root).resolve(strict=True)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if path.is_relative_to(root) and path.is_file():
            return path
    except (OSError, ValueError, RuntimeError):
        pass
    raise _no_file()


def _no_file() -> MediaError:
    return MediaError("file URLs may only name readable files under the server's media root", code=FORBIDDEN)
