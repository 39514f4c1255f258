"""A real browser sends its (pretended) camera by WHIP, from a page of another site."""

import asyncio
import functools
import http.server
import threading
from contextlib import contextmanager

import pytest
from camera_server import camera_server
from helpers.browser import browser, needs_browser
from helpers.camera_clients import KEY
from helpers.cameras import until

pytestmark = needs_browser

IDLE_S = 3.0  # a browser that is ended says no goodbye
PAGE = """<pre id=log></pre><script>
const query = new URLSearchParams(location.search)
const log = (...words) => document.getElementById('log').textContent += words.join(' ') + '\\n'
async function publish() {
  const media = await navigator.mediaDevices.getUserMedia({video: true, audio: query.has('audio')})
  const pc = window.pc = new RTCPeerConnection()
  for (const track of media.getTracks()) pc.addTransceiver(track, {direction: 'sendonly'})
  const channel = pc.createDataChannel('events')
  channel.onmessage = event => log('heard', JSON.parse(event.data).type)
  pc.onconnectionstatechange = () => log('state', pc.connectionState)
  await pc.setLocalDescription()
  if (!query.has('trickle'))
    while (pc.iceGatheringState !== 'complete') await new Promise(done => setTimeout(done, 50))
  const answer = await fetch(query.get('server') + '/v1/whip?fps=5', {
    method: 'POST', body: pc.localDescription.sdp,
    headers: {'Content-Type': 'application/sdp', Authorization: 'Bearer ' + query.get('key')}})
  log('answer', answer.status, answer.headers.get('location'), answer.headers.get('etag'))
  await pc.setRemoteDescription({type: 'answer', sdp: await answer.text()})
}
publish().catch(error => log('error', error))
</script>"""


@contextmanager
def site(tmp_path):
    """The address of a web site with the page."""
    (tmp_path / "index.html").write_text(PAGE)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


async def log_of(page):
    return (await page.evaluate("document.getElementById('log')?.textContent ?? ''")).splitlines()


@pytest.mark.parametrize("how", ["", "&trickle=1&audio=1"], ids=["whole", "without candidates, with audio"])
async def test_a_browser_sends_its_camera_by_whip(tmp_path, how):
    (tmp_path / "site").mkdir()
    with (
        site(tmp_path / "site") as address,
        camera_server(tmp_path, allow_origins=address, camera_idle_s=IDLE_S) as (service, url),
    ):
        async with browser(f"{address}/?server={url}&key={KEY}{how}") as page, asyncio.timeout(60):
            while not (service.live.sessions and service.live.sessions[0].count >= 5):
                await asyncio.sleep(0.2)
                assert not [line for line in await log_of(page) if line.startswith("error")]
            while "heard session.created" not in (lines := await log_of(page)):
                await asyncio.sleep(0.1)
        [answer] = [line.split() for line in lines if line.startswith("answer")]
        assert answer[1] == "201"
        assert answer[2].startswith("/v1/whip/camera-"), "the page may read where its camera is"
        assert answer[3].startswith('"')
        [session] = service.live.sessions
        assert session.frames[-1].pixels.std() > 10, "the browser's test picture has colours"
        assert await until(lambda: session.closed is not None, 60)
