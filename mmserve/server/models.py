"""GET /v1/models, and the check that a request names the model that is served."""

import time
from typing import Any

from fastapi import APIRouter, Request

from mmserve.core.errors import NotFound
from mmserve.generation import Generator

router = APIRouter()
STARTED = int(time.time())


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_card(request.app.state.service)]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    check_model(request.app.state.service, name)
    return _card(request.app.state.service)


def check_model(service: Generator, name: str | None) -> None:
    """NotFound unless ``name`` is the served model; a request that names none means the one there is."""
    if name is not None and name != service.model_name:
        raise NotFound(
            f"the model {name!r} is not served here; this server has {service.model_name!r}",
            param="model",
            code="model_not_found",
        )


def _card(service: Generator) -> dict[str, Any]:
    return {"id": service.model_name, "object": "model", "created": STARTED, "owned_by": "mmserve"}
