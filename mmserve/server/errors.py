"""Every error answer, whoever raised it, in the OpenAI shape."""

import asyncio
from typing import Any

import msgspec
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mmserve.core.errors import InvalidRequest, MMServeError, NotFound

LONGEST_MESSAGE = 1000  # an error may quote the caller's value, which may be a whole base64 picture


class ClientGone(MMServeError):
    """The client closed its connection before the answer was complete; nobody reads this error."""

    status = 499
    code = "client_closed_request"


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(InvalidRequest):
    status = 408
    code = "request_timeout"


class UnsupportedMediaType(InvalidRequest):
    status = 415
    code = "unsupported_media_type"


def unsupported(param: str, message: str) -> InvalidRequest:
    """A known field, or a value of one, that this server cannot honour; ``message`` says what to do."""
    return InvalidRequest(message, param=param, code="unsupported_value")


def error_body(error: MMServeError) -> dict[str, Any]:
    body = error.body()
    message = body["error"]["message"]
    if len(message) > LONGEST_MESSAGE:
        body["error"]["message"] = message[:LONGEST_MESSAGE] + " ..."
    return body


class Stopping(MMServeError):
    """The server was told to stop, and this request did not end within the deadline."""

    status = 503
    code = "server_stopping"


def told(error: BaseException) -> MMServeError:
    """What the client is told of ``error``: a fault of ours stays in our log."""
    if isinstance(error, MMServeError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return Stopping("the server is stopping; send the request to another one or try again later")
    return MMServeError("the server failed to answer; its log has the cause")


def error_response(error: MMServeError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status == 401:
        headers.setdefault("www-authenticate", "Bearer")
    if error.status in (408, 413):
        headers.setdefault("connection", "close")  # the rest of the body is not waited for
    if error.status == 503:
        headers.setdefault("retry-after", "1")
    return Response(msgspec.json.encode(error_body(error)), error.status, headers, "application/json")


def install(app: Starlette) -> None:
    """Answer the errors of ``app``'s routes and of its router in the OpenAI shape."""
    app.add_exception_handler(MMServeError, _on_known)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)


def _on_known(request: Request, error: Exception) -> Response:
    assert isinstance(error, MMServeError)
    return error_response(error)


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(_known(request, error), dict(error.headers or {}))


def _on_validation(request: Request, error: Exception) -> Response:
    return error_response(InvalidRequest(str(error)))


def _known(request: Request, error: HTTPException) -> MMServeError:
    where = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return NotFound(f"there is nothing at {where}")
    if error.status_code == 405:
        allowed = Headers(error.headers).get("allow", "another method")
        return MethodNotAllowed(f"{where} is not possible here; allowed: {allowed}")
    known = InvalidRequest(str(error.detail))
    known.status = error.status_code
    return known
