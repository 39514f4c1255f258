import argparse
import re
from pathlib import Path

import pytest

from mmserve.core.config import (
    BUNDLED_MODEL,
    NO_BOUND,
    Config,
    MediaOptions,
    add_arguments,
    from_arguments,
    options,
)
from mmserve.core.errors import ConfigError

ROOT = Path(__file__).parents[3]


def parsed(*flags: str) -> Config:
    parser = argparse.ArgumentParser()
    add_arguments(parser, "model", "cache", "scheduler", "runner", "media", "server")
    return from_arguments(parser.parse_args(flags))


def test_default_tree_is_valid_and_names_the_bundled_model() -> None:
    assert Config().model.model == BUNDLED_MODEL


def test_values_find_their_section() -> None:
    config = Config.of(port=0, page_size=1, dtype="float32")
    assert (config.server.port, config.cache.page_size, config.model.dtype) == (0, 1, "float32")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"port": 99999}, "port must be at most 65535, not 99999"),
        ({"dtype": "fp8"}, "dtype must be one of auto, bfloat16, float32, not 'fp8'"),
        ({"max_running": 0}, "max_running must be at least 1, not 0"),
        ({"max_running": True}, "max_running must be int, not True"),
        ({"max_model_len": "many"}, "max_model_len must be int or none, not 'many'"),
        ({"prot": 1}, "unknown option 'prot'"),
        ({"fetch_timeout_s": float("nan")}, "fetch_timeout_s must be a finite number, not nan"),
        ({"api_key": ""}, "api_key must not be empty"),
        ({"api_key": "one,,two"}, "api_key must not hold an empty key"),
        ({"api_key": "one, one"}, "api_key must not hold a key twice"),
        ({"max_image_pixels": 10**9}, "max_image_pixels must be at most 178956970"),
        ({"allow_private_urls": True, "fetch_urls": False}, "contradicts fetch_urls"),
        ({"media_root": "/no/such/folder"}, "media_root must be a folder"),
        ({"hang_timeout_s": 1}, "hang_timeout_s must be at least 3.0, not 1"),
        ({"step_timeout_s": 0}, "step_timeout_s must be at least 1.0, not 0"),
        ({"hang_timeout_s": 9, "engine_process": False}, "contradicts engine_process being off"),
        ({"allow_private_cameras": True}, "contradicts pull_cameras being off"),
        (
            {"webrtc_hosts": "10.0.0.1,example.org"},
            "webrtc_hosts must be numeric addresses, not 'example.org'",
        ),
        ({"webrtc_announce": "example.org"}, "webrtc_announce must be numeric addresses"),
        ({"webrtc_ports": "50000"}, "webrtc_ports must be LOWEST-HIGHEST within 1024-65535, not '50000'"),
        ({"webrtc_ports": "50100-50000"}, "webrtc_ports must be LOWEST-HIGHEST"),
        ({"webrtc_ports": "1000-2000"}, "webrtc_ports must be LOWEST-HIGHEST"),
        ({"ice_servers": "stun.example"}, "ice_servers must be stun:HOST:PORT or"),
        ({"ice_servers": "turn:me:s3cret@turn.example"}, "not 'turn:***@turn.example'"),
    ],
)
def test_wrong_value_names_field_value_and_what_is_allowed(values: dict, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.of(**values)
    assert words in str(caught.value)
    assert caught.value.param == next(iter(values))


def test_flags_are_made_from_the_tree() -> None:
    config = parsed("--port", "0", "--no-fetch-urls", "--fetch-timeout-s", "2", "--max-model-len", "128")
    assert config.server.port == 0
    assert config.media == MediaOptions(fetch_urls=False, fetch_timeout_s=2.0)
    assert config.model.max_model_len == 128


@pytest.mark.parametrize(
    "flags", [("--api-key", "one,two"), ("--api-key", "one", "--api-key", "two"), ("--api-key", "one , two")]
)
def test_several_keys_are_joined_by_commas_or_given_one_by_one(flags: tuple[str, ...]) -> None:
    assert parsed(*flags).server.api_keys == ("one", "two")


def test_one_key_or_none() -> None:
    assert parsed("--api-key", "one").server.api_keys == ("one",)
    assert parsed().server.api_keys == ()


def test_every_field_is_documented_and_named_once() -> None:
    names = [f.name for _, f in options()]
    assert len(names) == len(set(names))
    assert all(f.metadata["doc"] for _, f in options())


def test_tree_is_frozen_and_masks_keys_and_secrets() -> None:
    config = Config.of(api_key="secret")
    with pytest.raises(AttributeError):
        config.server.port = 1  # type: ignore[misc]
    assert "secret" not in str(config.flat())
    config = Config.of(ice_servers="stun:stun.example:3478,turn:me:secret@turn.example:3478")
    assert config.flat()["cameras"]["ice_servers"] == "stun:stun.example:3478, turn:***@turn.example:3478"


def test_no_option_is_parsed_and_ignored() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("mmserve", "preprocess", "engine", "encoders", "models")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "config.py"
    )
    assert [f.name for _, f in options() if not re.search(rf"\.{f.name}\b", code)] == []


def test_whole_answers_may_wait_unless_the_caller_says_otherwise() -> None:
    assert Config().scheduler.stall_factor is None
    assert Config().for_whole_answers().scheduler.stall_factor == NO_BOUND
    assert Config.of(stall_factor=3.0).for_whole_answers() == Config.of(stall_factor=3.0)
