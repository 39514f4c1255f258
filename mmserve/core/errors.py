"""Errors that a caller can read. Each has the OpenAI shape: type, code, param, message."""

from typing import Any


class MMServeError(Exception):
    """Base of every error that mmserve raises on purpose.

    ``message`` says what was wrong and what is allowed. ``param`` names the offending field as the
    caller wrote it, e.g. ``messages[1].content[0].image_url``. ``status`` is the HTTP status.
    """

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def body(self) -> dict[str, Any]:
        """The JSON body of an error answer, ``{"error": {...}}``."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class InvalidRequest(MMServeError):
    """The request itself is wrong; sending it again will fail again."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class MediaError(InvalidRequest):
    """A picture or clip could not be fetched or read, or is beyond a limit."""

    code = "invalid_media"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested tokens exceed what the model or the KV pool can hold."""

    code = "context_length_exceeded"


class PayloadTooLarge(InvalidRequest):
    status = 413
    code = "payload_too_large"


class Unauthorized(MMServeError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(MMServeError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MediaTimeout(MMServeError):
    """A media URL did not answer in time."""

    status = 504
    type = "server_error"
    code = "media_timeout"


class DeadlineExceeded(MMServeError):
    """The request's own deadline passed before its first token."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class NoTokenAllowed(InvalidRequest):
    """What the request asks for together forbids every token."""

    code = "no_token_allowed"
    said = "allowed_token_ids, bad_words, min_tokens and the form of the answer together forbid every token"


class InvalidGrammar(InvalidRequest):
    """The form that an answer was to have cannot be read, is beyond a limit, or cannot be kept to."""

    code = "invalid_grammar"


class Overloaded(MMServeError):
    """The bounded queue is full; the caller may try again later."""

    status = 503
    type = "server_error"
    code = "overloaded"


class OutOfMemory(MMServeError):
    """The device had no memory for a step; its newest request was given up, so that the others go on."""

    status = 503
    type = "server_error"
    code = "out_of_memory"
    said = "the device ran out of memory in a step of this request, the newest in it; try again later"


class EngineDead(MMServeError):
    """The engine loop ended with an error; nothing can be answered any more."""

    status = 503
    type = "server_error"
    code = "engine_dead"


class EngineRestarting(MMServeError):
    """The engine's or the detokenizer's process has ended and is being started again; try again soon."""

    status = 503
    type = "server_error"
    code = "engine_restarting"


class WorkersDead(MMServeError):
    """There are no preprocessing workers: they do not start, or were closed."""

    status = 503
    type = "server_error"
    code = "workers_dead"


class ConfigError(MMServeError):
    """An option is unknown, out of range or contradicts another."""

    code = "invalid_config"


class ModelLoadError(MMServeError):
    """A model folder is missing, incomplete or of an unsupported kind."""

    code = "model_load_failed"
