"""Errors that a caller can read, for applications that use mmserve."""

from mmserve.core.errors import (
    ConfigError,
    InvalidRequest,
    MediaError,
    MMServeError,
    NotFound,
    PayloadTooLarge,
)

__all__ = ["ConfigError", "InvalidRequest", "MMServeError", "MediaError", "NotFound", "PayloadTooLarge"]
