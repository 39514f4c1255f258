"""Bytes of a picture or clip: found where a caller says they are, and told apart."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from mmserve.chat_format import Loaded, MediaRef, build_part
from mmserve.core.config import MediaOptions
from mmserve.core.errors import InvalidRequest, MediaError
from mmserve.core.messages import ImagePart, VideoPart
from mmserve.core.metrics import Metrics
from mmserve.media_options import Kind
from mmserve.preprocess.library import MediaLibrary, StoredMedia
from mmserve.preprocess.source import Content, Fetcher

Result = TypeVar("Result")

NOT_FOUND = "media_not_found"
_VIDEO_BRANDS = (b"iso", b"mp4", b"avc1", b"qt  ", b"M4V", b"3gp", b"dash", b"MSNV")
_VIDEO_STARTS = (b"\x1a\x45\xdf\xa3", b"OggS", b"FLV\x01", b"\x30\x26\xb2\x75", b"\x00\x00\x01\xba", b"G@")


class MediaDesk:
    """Finds the media of requests: fetched from where they are, stored before, or bound to a uuid.

    One a server, on its event loop; ``close`` it there.
    """

    def __init__(self, options: MediaOptions, library: MediaLibrary, metrics: Metrics) -> None:
        self.options = options
        self.library = library
        self.metrics = metrics
        self.fetcher = Fetcher(options)

    async def find(self, refs: Sequence[MediaRef], owner: str) -> dict[str, Loaded]:
        """What ``refs`` of one request name, by their ``param``; the first error ends the rest.

        All that has a source is fetched at once. Then, in the order of the request, what came with a uuid is
        bound to it, and what has none but its uuid or its id is looked up among what ``owner`` sent.
        """
        self._check_count(refs)
        budget = Budget(max(self.options.max_image_bytes, self.options.max_video_bytes))
        sourced = [ref for ref in refs if ref.source is not None]
        fetched = await together([self._fetched(ref, budget) for ref in sourced])
        contents = {ref.param: content for ref, content in zip(sourced, fetched, strict=True)}
        return {ref.param: self._settled(ref, contents.get(ref.param), owner) for ref in refs}

    async def fetch(self, ref: MediaRef) -> Content:
        """The bytes behind the source of ``ref``."""
        assert ref.source is not None, "a reference with nothing to fetch"
        with self.metrics.timing("fetch"):
            return await self.fetcher.fetch(ref.source, ref.param, ref.kind or "image")

    async def close(self) -> None:
        await self.fetcher.close()

    async def _fetched(self, ref: MediaRef, budget: "Budget") -> Content:
        return budget.spend(await self.fetch(ref), ref.param)

    def _settled(self, ref: MediaRef, content: Content | None, owner: str) -> Loaded:
        if content is None:
            stored = self._stored(ref, owner)
            return Loaded(stored.data, stored.kind, stored.options)
        if ref.uuid is not None:
            self.library.bind(owner, ref.uuid, ref.kind or "image", content)
        return Loaded(content)

    def _stored(self, ref: MediaRef, owner: str) -> StoredMedia:
        if ref.media_id is not None:
            stored = self.library.get(owner, ref.media_id)
        else:
            stored = self.library.bound(owner, ref.uuid or "")
        if stored is None:
            raise MediaError(
                f"{ref.param}: nothing is stored under this {'id' if ref.media_id else 'uuid'}, or it has"
                " expired; send the media again",
                param=ref.param,
                code=NOT_FOUND,
            )
        return stored

    def _check_count(self, refs: Sequence[MediaRef]) -> None:
        items = sum(not ref.frame for ref in refs)
        if items > self.options.max_items:
            raise InvalidRequest(
                f"{items} pictures and clips are too many; at most {self.options.max_items} in one request",
                param="messages",
            )
        for ref in refs:
            if (ref.frame or 0) >= self.options.max_video_frames:
                raise MediaError(
                    f"a clip may have at most {self.options.max_video_frames} frames", param=ref.param
                )


class Budget:
    """How many bytes the media of one request may still have in all."""

    def __init__(self, limit: int) -> None:
        self.limit = self.left = limit

    def spend(self, content: Content, param: str) -> Content:
        self.left -= len(content) if isinstance(content, bytes) else sum(map(len, content))
        if self.left < 0:
            raise MediaError(
                f"the media of one request have more than {self.limit} bytes in all", param=param
            )
        return content


async def together(jobs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; the first error cancels the rest and is raised as itself."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def fetch_media(ref: MediaRef, options: MediaOptions) -> Loaded:
    """What ``ref`` names, for a caller who stores nothing; MediaError with its ``param`` if there is none."""
    if ref.source is None:
        raise MediaError(
            f"{ref.param}: nothing is stored here; ids and uuids are for the server",
            param=ref.param,
            code=NOT_FOUND,
        )
    async with Fetcher(options) as fetcher:
        return Loaded(await fetcher.fetch(ref.source, ref.param, ref.kind or "image"))


def media_part(content: Content, param: str) -> ImagePart | VideoPart:
    """A part for what was found, by what it is."""
    return build_part(Loaded(content), kind_of(content), {}, param)


def kind_of(content: Content) -> Kind:
    """What a file is by its first bytes; frames are a clip."""
    return "video" if isinstance(content, tuple) or is_video(content) else "image"


def is_video(data: bytes) -> bool:
    """Whether the signature is that of a video container (a GIF counts as a picture)."""
    if data[4:8] == b"ftyp":
        return data[8:12].startswith(_VIDEO_BRANDS)
    return data.startswith(_VIDEO_STARTS) or (data[:4] == b"RIFF" and data[8:12] == b"AVI ")
