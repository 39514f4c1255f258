"""For programs that have a camera: show a server what it sees, and ask about it.

async with LiveClient("http://127.0.0.1:8000", policy={"fps": 2}) as camera:
    camera.put(jpeg)
    async for piece in camera.ask("What do you see?"):
        print(piece.text, end="", flush=True)
"""

from mmserve.client.answers import Answer, LiveError, Piece
from mmserve.client.live import LiveClient

__all__ = ["Answer", "LiveClient", "LiveError", "Piece"]
