"""What the page has to know before it asks for anything: voices, languages, forms, and how to behave."""

import importlib.util
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mmserve.demos.placard import labels, tiny
from mmserve.demos.placard.options import Night, PlacardOptions
from mmserve.errors import InvalidRequest


@dataclass(frozen=True)
class Host:
    """The server that the placard hangs in: its ``model`` by name, whether that is the ``bundled`` one, and
    whether callers are ``keyed``."""

    model: str
    bundled: bool = False
    keyed: bool = False


class Settings:
    def __init__(self, options: PlacardOptions, host: Host) -> None:
        self.options, self.host = options, host
        self.night = Night.of(options.night) if options.night else None

    def body(self, now: datetime) -> dict[str, Any]:
        """What the page has to know; ``now`` is by the local clock."""
        options, host = self.options, self.host
        chosen = next(each for each in labels.LANGUAGES if each.id == self._begins_in())
        return {
            "voices": self._voices(),
            "voice": tiny.VOICE.id if host.bundled else options.voice,
            "languages": [self._language(each) for each in self._languages()],
            "language": chosen.id,
            "schema": self._schema(chosen),
            "alt_question": tiny.QUESTION if host.bundled else None,
            "alt_first": host.bundled,
            "pictures": host.bundled,
            "samples": tiny.SAMPLES if host.bundled else (),
            "unknown": tiny.UNKNOWN if host.bundled else None,
            "sampling": {"temperature": 0} if host.bundled else {},  # else as the model's makers advise
            "model": host.model,
            "keyed": host.keyed,
            "whip": importlib.util.find_spec("aiortc") is not None,
            "auto": options.auto,
            "still_s": options.still_s,
            "max_labels_per_min": options.max_labels_per_min,
            "saving": options.saving,
            "folder": None if options.saving == "off" else str(options.path),
            "kiosk": options.kiosk,
            "place": options.place,
            **self._fixed(chosen),
            "night": options.night,
            "asleep": self.night is not None and self.night.covers(now.time()),
            "asleep_changes_in_s": self.night.changes_in(now) if self.night else None,
        }

    def _voices(self) -> list[dict[str, Any]]:
        """All voices; the bundled model has one of its own, and cannot take on another."""
        bundled = self.host.bundled
        told = [self._voice(voice, available=not bundled) for voice in labels.VOICES]
        return [self._voice(tiny.VOICE, available=True), *told] if bundled else told

    def _voice(self, voice: labels.Voice, available: bool) -> dict[str, Any]:
        return {
            "id": voice.id,
            "name": voice.name,
            "note": voice.note,
            "instructions": voice.instructed(self.options.place),
            "question": labels.QUESTION,
            "available": available,
        }

    def _languages(self) -> list[labels.Language]:
        """Those that labels may be in: the bundled model speaks English alone."""
        return [each for each in labels.LANGUAGES if each.id == "en" or not self.host.bundled]

    def _begins_in(self) -> str:
        return "en" if self.host.bundled else self.options.language

    def _language(self, language: labels.Language) -> dict[str, Any]:
        return {
            "id": language.id,
            "name": language.name,
            "instructions": "" if self.host.bundled else language.instructions,
            "schema": self._schema(language),
            **self._fixed(language),
        }

    def _fixed(self, language: labels.Language) -> dict[str, str]:
        """The lines that are not the model's to write: what the options say, or the language's own."""
        return {name: getattr(self.options, name) or getattr(language, name) for name in labels.FIXED}

    def _schema(self, language: labels.Language, described: str | None = None) -> dict[str, Any]:
        return tiny.schema(described) if self.host.bundled else labels.schema(self._fixed(language))

    def form(self, described: str, language: str) -> dict[str, Any]:
        """The form of a label about what the model has described already. InvalidRequest for a language that
        labels cannot be in."""
        known = {each.id: each for each in self._languages()}
        if language not in known:
            raise InvalidRequest(f"language must be one of {', '.join(known)}", param="language")
        return self._schema(known[language], described)
