"""URLs of cameras: what may stand in them, and what is shown of them."""

import httpx
import pytest

from mmserve.core.config import CameraOptions, MediaOptions
from mmserve.core.errors import MediaError
from mmserve.live.sources.url import CameraUrl, Credentials, checked, media_for

SECRETS = "admin:s3cr%40t"


def test_a_url_is_taken_apart():
    url = CameraUrl.read(f"RTSP://{SECRETS}@Camera.example:8554/a/b?key=v%20w")
    assert url == CameraUrl("rtsp", "camera.example", 8554, "/a/b?key=v%20w", "admin", "s3cr@t")
    assert url.bare == "rtsp://camera.example:8554/a/b?key=v%20w"
    assert url.at("127.0.0.1", 9) == f"rtsp://{SECRETS}@127.0.0.1:9/a/b?key=v%20w"
    assert CameraUrl.read("http://[::1]/x").bare == "http://[::1]/x"


@pytest.mark.parametrize("scheme", ["rtsp", "rtsps", "http", "https"])
def test_secrets_are_never_shown(scheme):
    url = CameraUrl.read(f"{scheme}://{SECRETS}@camera.example/live?token=abc&password=x")
    assert url.shown == f"{scheme}://***@camera.example/live?***"


@pytest.mark.parametrize(
    "wrong",
    [
        *("", "camera", "ftp://x/y", "rtmp://x/y", "data:video/mp4;base64,AAAA", "rtsp://", "http:///x"),
        *("rtsp://x:99999/", "rtsp://x/a b", "rtsp://x/\nfoo", "http://x/" + "y" * 5000, "rtsp://[::1"),
        *("concat:file:///etc/passwd", "pipe:0", "/etc/passwd", "-i"),
    ],
)
def test_anything_else_is_refused_without_a_word_of_it(wrong):
    with pytest.raises(MediaError) as caught:
        CameraUrl.read(wrong)
    assert len(wrong) < 9 or wrong not in caught.value.message


@pytest.mark.parametrize("scheme", ["rtsp", "rtsps", "http", "https"])
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "10.1.2.3", "[::1]", "2130706433", "0x7f.1", "169.254.169.254"]
)
async def test_cameras_stand_behind_the_guard_of_media_urls(scheme, host):
    with pytest.raises(MediaError, match="not public"):
        await checked(CameraUrl.read(f"{scheme}://{host}/"), MediaOptions(), CameraOptions(pull_cameras=True))


async def test_private_cameras_may_be_allowed_without_private_media():
    options = CameraOptions(pull_cameras=True, allow_private_cameras=True)
    assert await checked(CameraUrl.read("rtsp://127.0.0.1/"), MediaOptions(), options) == ("127.0.0.1",)
    assert media_for(MediaOptions(), options).allow_private_urls
    assert not media_for(MediaOptions(), CameraOptions(pull_cameras=True)).allow_private_urls


async def test_where_fetching_is_off_no_camera_is_reached():
    options = CameraOptions(pull_cameras=True, allow_private_cameras=True)
    with pytest.raises(MediaError, match="switched off"):
        await checked(CameraUrl.read("http://127.0.0.1/"), MediaOptions(fetch_urls=False), options)


async def test_files_stand_under_the_media_root(tmp_path):
    (tmp_path / "root").mkdir()
    inside, outside = tmp_path / "root" / "clip.mp4", tmp_path / "other.mp4"
    for path in (inside, outside):
        path.write_bytes(b"x")
    media, options = MediaOptions(media_root=str(tmp_path / "root")), CameraOptions(pull_cameras=True)
    assert await checked(CameraUrl.read(f"file://{inside}"), media, options) == ()
    for path in (outside, tmp_path / "none.mp4"):
        with pytest.raises(MediaError, match="media root"):
            await checked(CameraUrl.read(f"file://{path}"), media, options)


@pytest.mark.parametrize("kind", ["Basic", "Digest"])
def test_credentials_are_shown_as_they_are_asked_for_and_not_before(kind):
    asked = []

    def answer(request):
        shown = request.headers.get("authorization")
        asked.append(shown)
        challenge = f'{kind} realm="x", nonce="abc", qop="auth"'
        return httpx.Response(200 if shown else 401, headers={} if shown else {"www-authenticate": challenge})

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        assert client.get("http://x/", auth=Credentials("me", "secret")).status_code == 200
    assert asked[0] is None
    assert asked[1].startswith(f"{kind} ")
    assert len(asked) == 2
