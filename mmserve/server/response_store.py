"""Responses that were given, kept for a while: to be read again, and to be answered."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

Messages = Sequence[Mapping[str, Any]]

MOST_RESPONSES = 10_000


class StoredResponse(Struct, frozen=True):
    """``messages`` are the whole conversation up to and with the answer, but for instructions; ``input`` is
    what the last request brought to it."""

    body: dict[str, Any]
    input: Any
    messages: Messages


class ResponseStore:
    """The last responses by owner and id, bounded in number and bytes; what was used last is kept longest.

    They are kept as JSON, pictures as they were sent, so that the bound is of memory: small objects take
    twenty times what they do there.
    For one event loop.
    """

    def __init__(self, most: int = MOST_RESPONSES, *, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self.used_bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, owner: str, response_id: str, response: StoredResponse) -> None:
        """Keep a new response; one that is larger than all the room there is, is not kept."""
        kept = msgspec.json.encode(response)
        if len(kept) > self.most_bytes:
            return
        self._kept[owner, response_id] = kept
        self.used_bytes += len(kept)
        while len(self._kept) > self.most or self.used_bytes > self.most_bytes:
            self.used_bytes -= len(self._kept.popitem(last=False)[1])

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        found = self._kept.get((owner, response_id))
        if found is None:
            return None
        self._kept.move_to_end((owner, response_id))
        return msgspec.json.decode(found, type=StoredResponse)

    def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was one."""
        found = self._kept.pop((owner, response_id), None)
        if found is not None:
            self.used_bytes -= len(found)
        return found is not None
