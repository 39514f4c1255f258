"""The request bodies in the generated API description (/docs, /openapi.json)."""

from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec import Struct

from mmserve.server.cameras import CameraRequest
from mmserve.server.completions import CompletionRequest
from mmserve.server.protocol import CaptionRequest, ChatRequest, MediaFields
from mmserve.server.responses import ResponseRequest
from mmserve.server.tokenize import DetokenizeRequest, TokenizeRequest

REF = "#/components/schemas/{name}"
JSON, FORM = "application/json", "multipart/form-data"
# The fields of a body stand in one struct or in several.
BODIES: dict[str, tuple[tuple[str, ...], tuple[type[Struct], ...]]] = {
    "/v1/chat/completions": ((JSON,), (ChatRequest,)),
    "/v1/responses": ((JSON,), (ResponseRequest,)),
    "/v1/completions": ((JSON,), (CompletionRequest,)),
    "/tokenize": ((JSON,), (TokenizeRequest,)),
    "/detokenize": ((JSON,), (DetokenizeRequest,)),
    "/v1/captions": ((JSON, FORM), (CaptionRequest, MediaFields)),
    "/v1/media": ((JSON, FORM), (MediaFields,)),
    "/v1/cameras": ((JSON,), (CameraRequest,)),
}


def describe_bodies(app: FastAPI) -> None:
    """Let ``app.openapi()`` tell the fields of the bodies, which the endpoints decode themselves."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        known = app.openapi_schema is not None
        document = plain()
        return document if known else _with_bodies(document)

    app.openapi = openapi  # type: ignore[method-assign]


def _with_bodies(document: dict[str, Any]) -> dict[str, Any]:
    kinds = sorted({kind for _, kinds in BODIES.values() for kind in kinds}, key=lambda k: k.__name__)
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, (media_types, parts) in BODIES.items():
        refs = [{"$ref": REF.format(name=kind.__name__)} for kind in parts]
        schema = refs[0] if len(refs) == 1 else {"allOf": refs}
        content = {media_type: {"schema": schema} for media_type in media_types}
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
