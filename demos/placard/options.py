"""What the placard can be told: each option checked when it is made, and a flag of the command."""

import os
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from mmserve.demos.placard.labels import LANGUAGES, LIMITS, VOICES
from mmserve.errors import ConfigError
from mmserve.options import Section, option

SAVING = ("off", "ask", "all")


def home() -> Path:
    """Where labels are kept unless a folder is named."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "mmserve" / "placard"


@dataclass(frozen=True)
class PlacardOptions(Section):
    voice: str = option(
        "curator",
        f"museum voice to begin with: {', '.join(voice.id for voice in VOICES)}",
        choices=tuple(voice.id for voice in VOICES),
    )
    language: str = option(
        "en", "language of labels and page to begin with", choices=tuple(known.id for known in LANGUAGES)
    )
    maker: str | None = option(None, "who made what the camera sees; an unknown maker if not given")
    dimensions: str | None = option(None, "its size; dimensions variable if not given")
    credit_line: str | None = option(None, "to whom it is owed; a loan from the present if not given")
    place: str | None = option(None, "where the placard hangs, which labels may speak of")
    auto: bool = option(True, "write by itself when the scene has changed and stands still")
    still_s: float = option(0.6, "seconds that a scene must stand still for that", low=0.1, high=60.0)
    max_labels_per_min: int = option(12, "most labels that are written by themselves, or saved", low=1)
    saving: str = option(
        "ask",
        "which labels are kept with their pictures: those somebody asks to keep, all, or none (off)",
        choices=SAVING,
    )
    folder: str | None = option(
        None, "where they are kept; mmserve/placard among this user's data if not given"
    )
    keep_labels: int = option(1000, "most labels that are kept; beyond it the oldest go", low=1)
    kiosk: bool = option(
        False, "for an exhibition: no menus, care for the screen, a log of nothing but counts"
    )
    night: str | None = option(None, "hours without writing, as 22:00-08:00")
    screen: bool = option(False, "also open the label alone, for a second display")
    public_url: str | None = option(
        None, "address of this server that QR codes lead to; that of the page if not given"
    )
    https: bool = option(
        False, "speak TLS with a certificate of one's own, since phones give no camera to a page without"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("maker", "dimensions", "credit_line"):
            longest = LIMITS[name]
            if len(getattr(self, name) or "") > longest:
                raise ConfigError(f"{name} must have at most {longest} characters", param=name)
        if self.night is not None:
            Night.of(self.night)
        if self.public_url is not None and not _is_address(self.public_url):
            raise ConfigError(
                f"public_url must be like https://placard.example:8000, not {self.public_url!r}",
                param="public_url",
            )

    @property
    def path(self) -> Path:
        return Path(self.folder).expanduser() if self.folder else home()


@dataclass(frozen=True)
class Night:
    """The hours from ``begins`` to ``ends``, by the local clock, every day."""

    begins: time
    ends: time

    @classmethod
    def of(cls, text: str) -> "Night":
        """ConfigError unless ``text`` is like 22:00-08:00."""
        try:
            begins, ends = (time.fromisoformat(part.strip()) for part in text.split("-"))
        except ValueError:
            begins = ends = time()
        if begins == ends or begins.tzinfo or ends.tzinfo:
            raise ConfigError(f"night must be two times like 22:00-08:00, not {text!r}", param="night")
        return cls(begins, ends)

    def covers(self, moment: time) -> bool:
        if self.begins < self.ends:
            return self.begins <= moment < self.ends
        return moment >= self.begins or moment < self.ends

    def changes_in(self, now: datetime) -> float:
        """Seconds until it begins, or ends."""
        due = datetime.combine(now.date(), self.ends if self.covers(now.time()) else self.begins)
        if due <= now:
            due += timedelta(days=1)
        return (due - now).total_seconds()


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.netloc) and parts.path in ("", "/")
