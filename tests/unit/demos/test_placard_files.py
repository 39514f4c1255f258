"""The files of the page: all of them are installed with the package, and of a kind that is served."""

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from mmserve.demos.placard.app import KINDS, STATIC

ROOT = Path(__file__).parents[3]


def test_every_file_is_of_a_kind_that_is_served_and_stands_in_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert len(files) > 1
    for path in files:
        name = path.relative_to(STATIC.parent).as_posix()
        depth = name.count("/")
        fitting = [p for p in patterns["mmserve.demos.placard"] if p.count("/") == depth and fnmatch(name, p)]
        assert fitting, f"{name} is not installed"
        assert path.suffix in KINDS, f"{name} is not served"


def test_pages_load_nothing_from_elsewhere():
    for path in STATIC.rglob("*"):
        if path.suffix in (".html", ".css", ".js", ".webmanifest"):
            text = path.read_text(encoding="utf-8")
            for mark in (
                'src="http',
                'href="http',
                "url(http",
                "url('http",
                'url("http',
                'from "http',
                "@import",
            ):
                assert mark not in text, f"{path.name} has {mark}"
