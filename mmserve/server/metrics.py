"""GET /metrics, for Prometheus. It shows counts and times, nothing of what was asked, and needs no key."""

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from mmserve.core.metrics import CONTENT_TYPE

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    text = await run_in_threadpool(request.app.state.service.metrics.render)
    return Response(text, media_type=CONTENT_TYPE)
