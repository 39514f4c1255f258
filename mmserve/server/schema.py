"""The request bodies in the generated API description (/docs, /openapi.json)."""

from typing import Any

import msgspec
from fastapi import FastAPI
from msgspec import Struct

from mmserve.server.protocol import CaptionRequest, ChatRequest

REF = "#/components/schemas/{name}"
BODIES: dict[str, dict[str, type[Struct]]] = {
    "/v1/chat/completions": {"application/json": ChatRequest},
    "/v1/captions": {"application/json": CaptionRequest, "multipart/form-data": CaptionRequest},
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
    kinds = sorted({kind for kinds in BODIES.values() for kind in kinds.values()}, key=lambda k: k.__name__)
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    document.setdefault("components", {}).setdefault("schemas", {}).update(components)
    for path, kinds_of in BODIES.items():
        content = {
            media_type: {"schema": {"$ref": REF.format(name=kind.__name__)}}
            for media_type, kind in kinds_of.items()
        }
        document["paths"][path]["post"]["requestBody"] = {"required": True, "content": content}
    return document
