"""Where the frames of cameras come from: pulled, sent by WebRTC, or uploaded."""
