"""Labels that are kept: whole or not at all, by whoever is killed; and gone when they are deleted."""

import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
from helpers.placard import jpeg, saved

from mmserve.demos.placard.store import Store, new_id
from mmserve.errors import ConfigError, NotFound


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "labels", keep=100)
    store.prepare()
    return store


def images(store):
    folder = store.folder / "images"
    return sorted(path.name for path in folder.iterdir())


def test_a_label_comes_back_as_it_was_saved_with_its_picture(store):
    kept = saved(title="“Très” 'grand' & 小さい", text="a\nb")
    store.save(kept, jpeg())
    again = Store(store.folder)
    assert again.get(kept.id) == kept
    assert again.image(kept.id) == jpeg()


def test_a_folder_that_was_never_used_is_empty_and_is_not_made(tmp_path):
    store = Store(tmp_path / "nothing")
    assert store.page(10) == ([], None)
    with pytest.raises(NotFound):
        store.get("abc")
    assert not store.folder.exists()


def test_pages_go_from_the_newest_to_the_oldest_and_survive_a_deletion_between_them(store):
    kept = [saved() for _ in range(5)]
    for label in kept:
        store.save(label, jpeg())
    first, following = store.page(2)
    store.delete(first[-1].id)
    second, following = store.page(2, following)
    third, end = store.page(2, following)
    assert [label.id for label in (*first, *second, *third)] == [label.id for label in reversed(kept)]
    assert end is None


def test_what_is_deleted_is_nowhere_in_the_folder(store):
    kept, other = saved(title="Xylophone of the night"), saved()
    store.save(kept, jpeg())
    store.save(other, jpeg("blue"))
    with closing(sqlite3.connect(store.folder / "labels.sqlite3")) as another:  # program that has it open
        another.execute("SELECT count(*) FROM labels").fetchall()
        store.delete(kept.id)
        for path in store.folder.iterdir():
            assert path.is_dir() or b"Xylophone" not in path.read_bytes(), path
    for gone in (store.get, store.image, store.delete):
        with pytest.raises(NotFound):
            gone(kept.id)
    assert images(store) == [f"{other.id}.jpg"]


def test_beyond_the_most_that_are_kept_the_oldest_go_with_their_pictures(tmp_path):
    store = Store(tmp_path, keep=3)
    store.prepare()
    kept = [saved() for _ in range(5)]
    for label in kept:
        store.save(label, jpeg())
    assert [label.id for label in store.page(10)[0]] == [label.id for label in reversed(kept[2:])]
    assert images(store) == sorted(f"{label.id}.jpg" for label in kept[2:])


def test_ids_cannot_be_guessed():
    names = {new_id() for _ in range(1000)}
    assert len(names) == 1000
    assert min(map(len, names)) >= 10
    assert not any(set(name) & set("./\\") for name in names)


def test_the_folder_is_its_owners_alone(store):
    assert store.folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_used_is_told_by_its_option(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as caught:
        Store(tmp_path / "file" / "labels").prepare()
    assert caught.value.param == "folder"
    (tmp_path / "labels.sqlite3").write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="cannot be read"):
        Store(tmp_path)


def test_many_save_and_delete_at_once_from_several_programs(tmp_path):
    """Each thread has a store of its own, as programs that share a folder have."""
    Store(tmp_path).prepare()
    kept, faults = [], []

    def work():
        store = Store(tmp_path)
        try:
            for number in range(8):
                label = saved()
                store.save(label, jpeg())
                store.page(5)
                if number % 2:
                    store.delete(label.id)
                else:
                    kept.append(label.id)
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    store = Store(tmp_path)
    assert {label.id for label in store.page(100)[0]} == set(kept)
    assert images(store) == sorted(f"{name}.jpg" for name in kept)


def test_a_save_that_fails_leaves_nothing_and_takes_nothing(store, monkeypatch):
    kept = saved()
    store.save(kept, jpeg())
    with pytest.raises(Exception, match="UNIQUE"):
        store.save(saved(kept.id), jpeg("blue"))
    assert store.image(kept.id) == jpeg()
    monkeypatch.setattr(Store, "_trim", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store.save(saved(), jpeg("blue"))
    assert store.page(10)[0] == [kept]
    assert images(store) == [f"{kept.id}.jpg"]


DIE = """
import os, sys, pathlib
sys.path[:0] = [{tests!r}]
from helpers.placard import jpeg, saved
from mmserve.demos.placard import store as module
store = module.Store(pathlib.Path({folder!r}))
store.prepare()
if {earlier}:
    store.save(saved("earlier", title="Earlier"), jpeg())
def die(*args, **kwargs):
    os._exit(9)
{where}
{what}
"""
BEFORE_THE_PICTURE_HAS_ITS_NAME = "pathlib.Path.rename = die"
BEHIND_THE_PICTURE = """
plain = pathlib.Path.rename
pathlib.Path.rename = lambda *args: (plain(*args), die())
"""
BEFORE_THE_COMMIT = """
from contextlib import contextmanager
plain = module.Store._written
@contextmanager
def written(*args):
    with plain(*args):
        yield
        die()
module.Store._written = written
"""
AFTER_THE_PICTURE_IS_GONE = """
plain = pathlib.Path.unlink
pathlib.Path.unlink = lambda *args, **kwargs: (plain(*args, **kwargs), die())
"""


def killed(folder, where, what, earlier=True):
    code = DIE.format(
        tests=str(Path(__file__).parents[2]), folder=str(folder), where=where, what=what, earlier=earlier
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 9, done.stderr


@pytest.mark.parametrize("where", [BEFORE_THE_PICTURE_HAS_ITS_NAME, BEHIND_THE_PICTURE, BEFORE_THE_COMMIT])
@pytest.mark.parametrize("earlier", [False, True])
def test_who_is_killed_between_picture_and_row_leaves_nothing_half(tmp_path, where, earlier):
    killed(tmp_path, where, 'store.save(saved("half", title="Half"), jpeg())', earlier)
    store = Store(tmp_path)
    names = ["earlier"] if earlier else []
    assert [label.id for label in store.page(10)[0]] == names
    assert images(store) == [f"{name}.jpg" for name in names]


def test_who_is_killed_while_deleting_has_deleted(tmp_path):
    killed(tmp_path, AFTER_THE_PICTURE_IS_GONE, 'store.delete("earlier")')
    store = Store(tmp_path)
    assert store.page(10) == ([], None)
    assert images(store) == []


def test_files_of_others_stay(store):
    store.save(saved(), jpeg())
    note = store.folder / "images" / "README.txt"
    note.write_text("mine")
    Store(store.folder)
    assert note.exists()
    assert os.listdir(store.folder / "images").count("README.txt") == 1
