"""/static: the client for browsers (``live.js``), and a page that shows what it does (``live.html``)."""

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse

from mmserve.core.errors import NotFound

router = APIRouter()

PREFIX = "/static/"
FOLDER = Path(__file__).parent / "static"
KINDS = {"live.js": "text/javascript", "live.html": "text/html"}
# Pages of other sites may use the client; where those may connect to is for ``allow_origins`` to say.
HEADERS = {
    "access-control-allow-origin": "*",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}


@router.get(f"{PREFIX}{{name}}")
async def static(name: str) -> FileResponse:
    if name not in KINDS:
        raise NotFound(f"there are {', '.join(KINDS)} here")
    return FileResponse(FOLDER / name, media_type=KINDS[name], headers=HEADERS)
