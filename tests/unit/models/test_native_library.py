"""Native kernels are compiled once, kept apart by what they were made of, and missed for a reason."""

import tempfile

import pytest

from mmserve.models.ops.native import library
from mmserve.models.ops.native.library import NativeUnavailable

ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return %d; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources and a cache of this test's own."""
    monkeypatch.setattr(library, "HERE", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def forget():
    for cached in (library.load, library._folder, library._version):
        cached.cache_clear()


def compiled(sources):
    return sorted((sources / "cache" / "mmserve" / "native").iterdir())


def test_compiled_once_and_anew_when_the_source_changes(sources):
    (sources / "some.cpp").write_text(ANSWER % 42)
    assert library.load("some").answer() == 42
    first = compiled(sources)
    forget()
    assert library.load("some").answer() == 42
    assert compiled(sources) == first, "nothing was compiled again"
    (sources / "some.cpp").write_text(ANSWER % 43)
    forget()
    assert library.load("some").answer() == 43
    assert len(compiled(sources)) == 2


def test_a_source_that_does_not_compile_says_so(sources):
    (sources / "some.cpp").write_text("nonsense")
    with pytest.raises(NativeUnavailable, match="could not be compiled"):
        library.load("some")
    assert compiled(sources) == [], "nothing half made is left behind"


def test_without_a_compiler_the_reason_is_told(sources, monkeypatch):
    (sources / "some.cpp").write_text(ANSWER % 42)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        library.load("some")


def test_without_a_cache_kernels_run_and_leave_nothing_and_it_is_told(sources, monkeypatch, caplog):
    (sources / "some.cpp").write_text(ANSWER % 42)
    (sources / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(sources / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(sources))
    before = sorted(sources.iterdir())
    assert library.load("some").answer() == 42
    assert sorted(sources.iterdir()) == before
    assert "compiled anew at every start" in caplog.text
