"""Digests that name content. Each field is length-framed, so no two field lists collide."""

import hashlib

DIGEST_BYTES = 32


def framed_digest(*fields: bytes | memoryview | str | int) -> bytes:
    """BLAKE2b (32 bytes) over ``fields``, each preceded by its kind and its length in bytes."""
    h = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for field in fields:
        kind, data = _encoded(field)
        h.update(kind + len(data).to_bytes(8, "little"))
        h.update(data)
    return h.digest()


def _encoded(field: bytes | memoryview | str | int) -> tuple[bytes, bytes | memoryview]:
    if isinstance(field, str):
        return b"s", field.encode()
    if isinstance(field, int):
        return b"i", str(field).encode()
    return b"b", memoryview(field).cast("B")
