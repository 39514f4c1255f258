"""A real browser sends its (pretended) camera by WHIP, from a page of another site."""

import asyncio
import functools
import http.server
import json
import shutil
import subprocess
import threading
from contextlib import asynccontextmanager, contextmanager

import pytest
from helpers.cameras import until
from test_cameras import KEY, camera_server
from websockets.asyncio.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (the Debian package `chromium`)")

FLAGS = [
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0"),
    *("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"),
    "--allow-loopback-in-peer-connection",
]
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


@asynccontextmanager
async def browsing(tmp_path, address):
    """A browser at ``address``; yields what tells the page's log."""
    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path}/profile", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    told = tmp_path / "profile" / "DevToolsActivePort"
    try:
        assert await until(lambda: told.exists() and "/" in told.read_text(), 60)
        port, path = told.read_text().split()
        async with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as devtools:
            yield functools.partial(page_log, devtools, await attached(devtools, address))
    finally:
        process.terminate()
        process.wait(20)


async def asked(devtools, method, session=None, **params):
    to = {} if session is None else {"sessionId": session}
    await devtools.send(json.dumps({"id": 1, "method": method, "params": params, **to}))
    while "id" not in (said := json.loads(await devtools.recv())):
        pass
    return said["result"]


async def attached(devtools, address):
    """The session of the tab that shows ``address``."""
    while True:
        targets = (await asked(devtools, "Target.getTargets"))["targetInfos"]
        for target in targets:
            if target["type"] == "page" and target["url"].startswith(address[:20]):
                found = await asked(
                    devtools, "Target.attachToTarget", targetId=target["targetId"], flatten=True
                )
                return found["sessionId"]
        await asyncio.sleep(0.1)


async def page_log(devtools, session):
    code = "document.getElementById('log')?.textContent ?? ''"
    found = await asked(devtools, "Runtime.evaluate", session, expression=code)
    return found["result"]["value"].splitlines()


@pytest.mark.parametrize("how", ["", "&trickle=1&audio=1"], ids=["whole", "without candidates, with audio"])
async def test_a_browser_sends_its_camera_by_whip(tmp_path, how):
    (tmp_path / "site").mkdir()
    with site(tmp_path / "site") as address, camera_server(tmp_path, allow_origins=address) as (service, url):
        async with browsing(tmp_path, f"{address}/?server={url}&key={KEY}{how}") as log:
            async with asyncio.timeout(60):
                while not (service.live.sessions and service.live.sessions[0].count >= 5):
                    await asyncio.sleep(0.2)
                    assert not [line for line in await log() if line.startswith("error")], await log()
                while "heard session.created" not in await log():
                    await asyncio.sleep(0.1)
            lines = await log()
        [answer] = [line.split() for line in lines if line.startswith("answer")]
        assert answer[1] == "201"
        assert answer[2].startswith("/v1/whip/camera-"), "the page may read where its camera is"
        assert answer[3].startswith('"')
        [session] = service.live.sessions
        assert session.frames[-1].pixels.std() > 10, "the browser's test picture has colours"
        assert await until(lambda: session.closed is not None, 60)
