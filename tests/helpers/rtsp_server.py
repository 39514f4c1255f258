"""GStreamer's RTSP server, where the machine has it: somebody else's idea of what a camera says."""

import subprocess
from contextlib import contextmanager
from functools import cache

import pytest

PYTHON = "/usr/bin/python3"  # whose packages Debian's bindings are
PACKAGES = "python3-gi gir1.2-gst-rtsp-server-1.0 gstreamer1.0-plugins-good gstreamer1.0-plugins-ugly"
IMPORTS = """
import sys, gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer
Gst.init(None)
"""
PROBE = IMPORTS + "sys.exit(not all(Gst.ElementFactory.find(name) for name in sys.argv[1:]))"
SERVE = (
    IMPORTS
    + """
server = GstRtspServer.RTSPServer(address="127.0.0.1", service="0")
factory = GstRtspServer.RTSPMediaFactory(launch=sys.argv[1], shared=True)
server.get_mount_points().add_factory("/stream", factory)
server.attach(None)
print(server.get_bound_port(), flush=True)
GLib.MainLoop().run()
"""
)
BALL = "videotestsrc is-live=true pattern=ball ! video/x-raw,format=I420,width=320,height=240,framerate=15/1"
STREAMS = {
    "h264": ("x264enc tune=zerolatency key-int-max=15", "rtph264pay name=pay0 pt=96"),
    "mjpeg": ("jpegenc", "rtpjpegpay name=pay0 pt=26"),
}


@cache
def there(kind):
    """Whether a stream of this kind can be served."""
    elements = [words.split()[0] for words in ("videotestsrc", *STREAMS[kind])]
    probe = [PYTHON, "-c", PROBE, *elements]
    try:
        return subprocess.run(probe, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextmanager
def rtsp_server(kind):
    """The URL of a white ball that moves on black; skipped, with the reason, where it cannot be had."""
    if not there(kind):
        pytest.skip(f"no RTSP server of GStreamer's that sends {kind}; in Debian: {PACKAGES}")
    launch = f"( {' ! '.join((BALL, *STREAMS[kind]))} )"
    with subprocess.Popen([PYTHON, "-c", SERVE, launch], stdout=subprocess.PIPE, text=True) as server:
        try:
            yield f"rtsp://127.0.0.1:{int(server.stdout.readline())}/stream"
        finally:
            server.kill()
