"""From a name to a folder, without a network."""

import pytest

from mmserve.core.errors import ModelLoadError
from mmserve.models import hub


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """A hub that cannot be reached, and an empty cache."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls = []

    def download(name, **options):
        calls.append((name, options))
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_existing_folder(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_a_revision_of_a_folder_is_refused_not_ignored(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="no revision 'main'"):
        hub.resolve(str(tmp_path), "main")


def test_folder_without_config(tmp_path):
    with pytest.raises(ModelLoadError, match=r"it has no config\.json"):
        hub.resolve(str(tmp_path))


def test_missing_path_is_not_taken_for_a_hub_name(offline):
    with pytest.raises(ModelLoadError, match="there is no model folder /no/such/folder"):
        hub.resolve("/no/such/folder")
    assert not offline


def test_hub_name_that_is_neither_cached_nor_reachable(offline):
    with pytest.raises(
        ModelLoadError, match="cannot load model owner/name: it is not in the cache and the hub"
    ):
        hub.resolve("owner/name")


def test_dummy_weights_download_no_weights(offline):
    for weights in (True, False):
        with pytest.raises(ModelLoadError):
            hub.resolve("owner/name", "main", weights=weights)
    patterns = [options["allow_patterns"] for _, options in offline]
    assert ["*.safetensors" in p for p in patterns] == [True, False]


def test_name_that_is_neither(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelLoadError, match="neither a folder here nor a hub name"):
        hub.resolve("a name with spaces")


def test_cached_model_works_offline(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert hub.resolve("owner/name") == snapshot
    with pytest.raises(ModelLoadError, match="not in the cache and the hub cannot be reached"):
        hub.resolve("owner/other")
