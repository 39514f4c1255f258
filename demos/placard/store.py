"""The labels that are kept: rows of SQLite, and their pictures as files beside it.

Every change is made inside one transaction that holds SQLite's write lock, files included, so that whoever is
killed at any moment leaves either a whole label or, at most, a file without a row or a row without a file;
the next opening takes those away. All methods may be called from any thread, and several programs may share a
folder.
"""

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mmserve.demos.placard.labels import Label
from mmserve.errors import ConfigError, NotFound

LOCK_S = 10.0  # that a change may wait for another
ID_BYTES = 8
MOST_A_PAGE = 100
_TABLE = """
CREATE TABLE IF NOT EXISTS labels (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    label TEXT NOT NULL,
    voice TEXT NOT NULL,
    language TEXT NOT NULL,
    model TEXT NOT NULL,
    seen_at TEXT NOT NULL,
    saved_at TEXT NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL
)"""
_COLUMNS = "id, label, voice, language, model, seen_at, saved_at, width, height"


@dataclass(frozen=True)
class Saved:
    """A label with where it comes from. Moments are ISO 8601 with their zone; the picture's size as shown."""

    id: str
    label: Label
    voice: str
    language: str
    model: str
    seen_at: str
    saved_at: str
    width: int
    height: int


class Store:
    """Labels in ``folder``; the newest ``keep`` of them stay. ConfigError if it holds what cannot be read."""

    def __init__(self, folder: Path, keep: int = 1000) -> None:
        self.folder, self.keep = folder, keep
        self._images = folder / "images"
        self._file = folder / "labels.sqlite3"
        self._lock = threading.Lock()
        try:
            if self._file.exists():
                self.mend()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the labels in {folder} cannot be read: {error}", param="folder") from None

    def prepare(self) -> None:
        """Make the folder, for its owner alone. ConfigError if that cannot be."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._images.mkdir(mode=0o700, exist_ok=True)
            with self._lock, closing(self._open()) as db:
                db.execute("PRAGMA journal_mode=WAL")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"labels cannot be kept in {self.folder}: {error}", param="folder") from None

    def save(self, saved: Saved, image: bytes) -> None:
        """Keep a label under its ``id``, a new one of ``new_id``, in the folder that was prepared."""
        row = (saved.id, msgspec.json.encode(saved.label).decode(), *_told(saved))
        with self._changing() as db:
            db.execute(f"INSERT INTO labels ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            with self._written(saved.id, image):
                self._trim(db)

    def page(self, limit: int, before: int | None = None) -> tuple[list[Saved], int | None]:
        """A page of at most ``limit`` labels, the newest first, and what is ``before`` of the next page; None
        where there is none."""
        if not self._file.exists():
            return [], None
        below = before if before is not None else (1 << 62)
        with closing(self._open()) as db:
            rows = db.execute(
                f"SELECT number, {_COLUMNS} FROM labels WHERE number < ? ORDER BY number DESC LIMIT ?",
                (below, limit + 1),
            ).fetchall()
        following = rows[limit - 1][0] if len(rows) > limit else None
        return [_saved(row[1:]) for row in rows[:limit]], following

    def get(self, name: str) -> Saved:
        """NotFound if it was never there, or was deleted."""
        row = None
        if self._file.exists():
            with closing(self._open()) as db:
                row = db.execute(f"SELECT {_COLUMNS} FROM labels WHERE id = ?", (name,)).fetchone()
        if row is None:
            raise _missing(name)
        return _saved(row)

    def image(self, name: str) -> bytes:
        """The picture of a label, a JPEG file. NotFound as ``get``."""
        self.get(name)
        try:
            return self._image(name).read_bytes()
        except FileNotFoundError:
            raise _missing(name) from None

    def delete(self, name: str) -> None:
        """Take away a label and its picture for good. NotFound as ``get``."""
        self.get(name)
        with self._changing() as db:
            self._remove(db, name)
        with closing(self._open()) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what was deleted is in no log either

    def mend(self) -> None:
        """Take away what a killed program has left half."""
        with self._changing() as db:
            rows = {name for (name,) in db.execute("SELECT id FROM labels")}
            files = {path.stem: path for path in self._images.glob("*") if path.suffix == ".jpg"}
            for name in rows - files.keys():
                self._remove(db, name)
            for name in files.keys() - rows:
                files[name].unlink(missing_ok=True)
            for path in self._images.glob("*.part"):
                path.unlink(missing_ok=True)

    def _trim(self, db: sqlite3.Connection) -> None:
        newest = "SELECT number FROM labels ORDER BY number DESC LIMIT ?"
        old = db.execute(f"SELECT id FROM labels WHERE number NOT IN ({newest})", (self.keep,))
        for (name,) in old.fetchall():
            self._remove(db, name)

    def _remove(self, db: sqlite3.Connection, name: str) -> None:
        """The picture goes first: it is what must not stay behind."""
        self._image(name).unlink(missing_ok=True)
        db.execute("DELETE FROM labels WHERE id = ?", (name,))

    @contextmanager
    def _written(self, name: str, image: bytes) -> Iterator[None]:
        """The picture is there inside the block, and afterwards unless the block fails."""
        part = self._images / f"{name}.part"
        try:
            with part.open("wb") as file:
                file.write(image)
                file.flush()
                os.fsync(file.fileno())
            part.rename(self._image(name))
            yield
        except BaseException:
            part.unlink(missing_ok=True)
            self._image(name).unlink(missing_ok=True)
            raise

    def _image(self, name: str) -> Path:
        return self._images / f"{name}.jpg"

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Alone among all who change something, in this program and others."""
        with self._lock, closing(self._open()) as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(self._file, timeout=LOCK_S, isolation_level=None)
        db.execute("PRAGMA secure_delete=ON")
        db.execute(_TABLE)
        return db


def new_id() -> str:
    """One that nobody can guess: who does not know a label's address does not find it."""
    return secrets.token_urlsafe(ID_BYTES)


def _told(saved: Saved) -> tuple[str | int, ...]:
    return (
        saved.voice,
        saved.language,
        saved.model,
        saved.seen_at,
        saved.saved_at,
        saved.width,
        saved.height,
    )


def _saved(row: tuple[str, ...]) -> Saved:
    name, label, *rest = row
    return Saved(name, msgspec.json.decode(label, type=Label), *rest)  # type: ignore[arg-type]


def _missing(name: str) -> NotFound:
    return NotFound(f"there is no label {name[:40]!r} here; it may have been deleted", param="id")
