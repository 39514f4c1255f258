"""/v1/whip: cameras by WebRTC, as browsers, OBS and FFmpeg send them (WHIP, RFC 9725).

    POST   application/sdp                          → 201, the answer, Location, ETag
    PATCH  application/trickle-ice-sdpfrag          → 204 more candidates of the client's
    DELETE                                          → 200 the end

The key is asked for at the door, so nobody without one has a peer connection made. The answer holds all of
this server's candidates. There are no ICE restarts: who has lost its connection posts anew.
"""

import importlib.util
import ipaddress
import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from mmserve.core.config import CameraOptions, listed
from mmserve.core.errors import InvalidRequest, MMServeError, NotFound
from mmserve.live.cameras import Camera, Cameras
from mmserve.live.sources.messages import Trickle
from mmserve.live.sources.sdp import check_offer, trickled, ufrag
from mmserve.server.cameras import sent
from mmserve.server.errors import UnsupportedMediaType
from mmserve.server.reply import reply

router = APIRouter()

SDP, FRAGMENT = "application/sdp", "application/trickle-ice-sdpfrag"
INSTALLED = importlib.util.find_spec("aiortc") is not None


class NotInstalled(MMServeError):
    status = 501
    code = "webrtc_not_installed"


class PreconditionFailed(InvalidRequest):
    status = 412
    code = "precondition_failed"


class PreconditionRequired(InvalidRequest):
    status = 428
    code = "precondition_required"


class NoRestart(InvalidRequest):
    status = 422
    code = "unsupported_ice_restart"


@router.options("/v1/whip")
async def whip_options(request: Request) -> Response:
    """What a client may want to know before it makes its offer."""
    headers = {"accept-post": SDP, "allow": "POST, OPTIONS"}
    return _linked(Response(status_code=204, headers=headers), request.app.state.config.cameras)


@router.post("/v1/whip")
async def whip(request: Request) -> Response:
    if not INSTALLED:
        raise NotInstalled("this server speaks no WebRTC; pip install 'mmserve[webrtc]' brings it")
    offer = await _text(request, SDP)
    check_offer(offer)
    camera = await sent(request, "whip")
    cameras: Cameras = request.app.state.cameras
    answer = await cameras.answer(camera, offer, _reached(request))
    camera.tag, camera.ufrag = f'"{secrets.token_hex(8)}"', ufrag(offer)
    headers = {
        "location": f"/v1/whip/{camera.id}",
        "etag": camera.tag,
        "accept-patch": FRAGMENT,
        "cache-control": "no-store",
    }
    return _linked(Response(answer, 201, headers, SDP), request.app.state.config.cameras)


@router.patch("/v1/whip/{camera_id}")
async def trickle(request: Request, camera_id: str) -> Response:
    camera = _own(request, camera_id)
    fragment = await _text(request, FRAGMENT)
    match = request.headers.get("if-match")
    if match is None:
        raise PreconditionRequired("send If-Match with the ETag of the answer", param="if-match")
    restarts = ufrag(fragment) not in (None, camera.ufrag)
    if restarts:
        raise NoRestart("there are no ICE restarts here; post a new offer")
    if match not in ("*", camera.tag):
        raise PreconditionFailed("If-Match is not the ETag of the answer", param="if-match")
    camera.say(Trickle(trickled(fragment)))
    return Response(status_code=204)


@router.delete("/v1/whip/{camera_id}")
async def end(request: Request, camera_id: str) -> Response:
    camera = _own(request, camera_id)
    await request.app.state.cameras.end(camera, "its client has ended it")
    return reply({"id": camera.id, "object": "camera", "deleted": True})


def _own(request: Request, camera_id: str) -> Camera:
    camera: Camera = request.app.state.cameras.get(request.scope["owner"], camera_id)
    if camera.kind != "whip" or camera.id != camera_id or camera.state == "ended":
        raise NotFound("there is no such WHIP session, or it has ended", param="camera")
    return camera


async def _text(request: Request, kind: str) -> str:
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != kind:
        raise UnsupportedMediaType(f"the content type must be {kind}, not {given[:100] or 'none'}")
    try:
        return (await request.body()).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8 text") from None


def _reached(request: Request) -> str | None:
    """The address of this machine that the client has connected to."""
    try:
        return str(ipaddress.ip_address((request.scope.get("server") or ("",))[0]))
    except ValueError:
        return None


def _linked(answer: Response, options: CameraOptions) -> Response:
    """With the ICE servers that clients may use, too. Their secrets are given to who has shown a key."""
    for server in listed(options.ice_servers):
        kind, _, rest = server.partition(":")
        secret, _, place = rest.rpartition("@")
        user, _, password = secret.partition(":")
        extra = f'; username="{user}"; credential="{password}"; credential-type="password"' if user else ""
        answer.headers.append("link", f'<{kind}:{place}>; rel="ice-server"{extra}')
    return answer
