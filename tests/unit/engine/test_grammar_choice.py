"""Which library keeps answers to their forms is chosen once, told, and never another."""

import importlib.util

import pytest

from mmserve import backends
from mmserve.core.config import Config
from mmserve.core.errors import ConfigError
from mmserve.engine.grammar.choose import choose_grammar, desk_for
from mmserve.loading import load_engine


@pytest.fixture
def without_xgrammar(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "xgrammar" else found(name, *a)
    )


def test_guidance_is_the_default_and_is_told():
    assert backends.expected(Config())["grammars"]["runs"] == "llguidance"
    desk = desk_for("guidance", "", 64, ())
    assert desk.library == "llguidance"
    desk.close()


@pytest.mark.usefixtures("without_xgrammar")
def test_xgrammar_that_is_not_installed_is_an_error_with_the_command():
    config = Config.of(grammar_backend="xgrammar")
    for ask in (
        lambda: choose_grammar("xgrammar"),
        lambda: load_engine(config, (1,), ""),
        lambda: desk_for("xgrammar", "", 64, (1,)),
    ):
        with pytest.raises(ConfigError, match=r"pip install .*mmserve\[xgrammar\]") as error:
            ask()
        assert error.value.param == "grammar_backend"


def test_a_backend_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="guidance, xgrammar"):
        Config.of(grammar_backend="outlines")
