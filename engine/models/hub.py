"""Models from Hugging Face, in its own cache. A commit that is in the cache is used without asking the network. Imports no torch.

HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and HF_TOKEN mean what they mean to huggingface_hub.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError

_SMALL_FILES = ["*.json", "*.jinja", "*.model", "merges.txt"]
# not every *.safetensors and *.bin: some repositories hold the same weights twice, under other names
_SAFETENSORS, _PICKLES = "model*.safetensors", "pytorch_model*.bin"


@dataclass(frozen=True)
class HubModel:
    """A repository at a revision: a branch, a tag or a commit; None: its main branch. `asked`: the option that names it, and its value."""

    repository: str
    revision: str | None
    asked: str


def is_repository(name: str) -> bool:
    """Whether `name` has the form `org/name`."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) is not None


def fetch_config(model: HubModel) -> Path:
    """The folder with config.json and with what else the cache has of that commit, which is the folder's name. Raises UserError."""
    from huggingface_hub import hf_hub_download

    with _explained(model):
        _require_hub(model)
        return Path(hf_hub_download(model.repository, "config.json", revision=model.revision)).parent


def fetch_model(model: HubModel) -> Path:
    """The folder of the whole model, its name the commit; pickled weights are fetched only where there are no others. Raises UserError."""
    from huggingface_hub import snapshot_download

    commit = fetch_config(model).name
    with _explained(model):
        folder = Path(snapshot_download(model.repository, revision=commit, allow_patterns=[*_SMALL_FILES, _SAFETENSORS]))
        if not any(folder.glob(_SAFETENSORS)):
            snapshot_download(model.repository, revision=commit, allow_patterns=[*_SMALL_FILES, _PICKLES])
    return folder


def _require_hub(model: HubModel) -> None:
    """Raises at once, where nothing is in the cache and the hub cannot be reached: hf_hub_download would try for half a minute."""
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model.repository, "config.json", revision=model.revision), str):
        return
    with suppress(errors.HfHubHTTPError):  # an answer, which hf_hub_download gets too
        get_hf_file_metadata(hf_hub_url(model.repository, "config.json", revision=model.revision))


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Raises UserError, which says it all: huggingface_hub's own warnings are not shown."""
    from huggingface_hub import errors
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except (OSError, errors.HTTPError, errors.HFValidationError) as error:
        raise _explain(model, error) from None
    finally:
        logging.set_verbosity(verbosity)


def _explain(model: HubModel, error: Exception) -> UserError:
    """What huggingface_hub said, in terms of what the user can do."""
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model.repository}"
    at = f" at revision '{model.revision}'" if model.revision else ""
    if isinstance(error, errors.GatedRepoError):
        what = f"'{model.repository}' is open only to accounts that accepted its terms: accept them at {page} and set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        what = f"no model '{model.repository}' at {constants.ENDPOINT}, or a private one: check the name, or set HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        what = f"'{model.repository}' has no revision '{model.revision}'; its branches, tags and commits are listed at {page}/commits"
    elif isinstance(error, errors.LocalEntryNotFoundError | ConnectionError) or (
        isinstance(error, errors.HTTPError) and not isinstance(error, errors.HfHubHTTPError)  # no answer
    ):
        where = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        what = f"{where}, and the cache '{constants.HF_HUB_CACHE}' does not have all of '{model.repository}'{at}; give a local folder"
    elif isinstance(error, errors.EntryNotFoundError):
        what = f"'{model.repository}'{at} has no config.json; allowed: a model in transformers' layout, or the path of a GGUF file"
    else:
        what = f"'{model.repository}'{at} cannot be had from {constants.ENDPOINT}: {str(error).splitlines()[0]}"
    return UserError(f"{model.asked}: {what}")
