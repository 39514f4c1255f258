"""From a model's name to a folder on this machine. No torch."""

from pathlib import Path

from mmserve.core.config import BUNDLED_MODEL
from mmserve.core.errors import ModelLoadError

SMALL_FILES = ("*.json", "*.jinja", "*.txt")
WEIGHT_FILES = ("*.safetensors",)


def resolve(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of a model: an existing path, the bundled tiny-vl, or a download from the hub.

    A download shows its progress and works offline once it is in the cache. ``weights`` False leaves
    the weight files out. ModelLoadError when there is no such folder and the hub cannot give it.
    """
    if revision is not None and (name == BUNDLED_MODEL or Path(name).expanduser().exists()):
        raise ModelLoadError(f"{name} is on this machine and has no revision {revision!r}", param="revision")
    if Path(name).expanduser().exists():
        return _local(Path(name).expanduser())
    if name == BUNDLED_MODEL:
        return _local(Path(__file__).parent / "tiny" / "checkpoint")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no model folder {name}", param="model")
    return _download(name, revision, SMALL_FILES + (WEIGHT_FILES if weights else ()))


def _local(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} is not a model folder: it has no config.json", param="model")
    return folder


def _download(name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    # Imported here: it is slow to import and a local folder does not need it.
    from httpx import HTTPError
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = name if revision is None else f"{name} at revision {revision}"
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns="*/*"
        )
    except HFValidationError:
        reason = "it is neither a folder here nor a hub name (owner/name)"
    except GatedRepoError:
        reason = "the hub wants you to accept its terms and log in (hf auth login)"
    except RevisionNotFoundError:
        reason = "the hub has no such revision"
    except RepositoryNotFoundError:
        reason = "the hub has no such model, or it is private and you are not logged in"
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError, OSError) as error:
        reason = f"it is not in the cache and the hub cannot be reached ({str(error).splitlines()[0]})"
    else:
        return _local(Path(folder))
    raise ModelLoadError(f"cannot load model {wanted}: {reason}", param="model")
