"""Resolves checkpoints named `org/name[@revision]` on the Hugging Face hub through huggingface_hub's cache.

Only safetensors weights are fetched, never pickles or code.
"""

import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import ModelCheckpointError

logger = logging.getLogger(__name__)
WEIGHTS = ("*.safetensors",)
CONFIGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""File name patterns of small files: configurations, shard indices, tokenizers, chat templates."""
NEVER = ("*/*", "consolidated*")
"""File name patterns of files that hold the same weights in other formats: subfolders, and Mistral's consolidated files
next to the shards.
"""
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


class HubError(ModelCheckpointError):
    """A checkpoint of the hub is not available; the message is one line that tells what to do."""


class HubName(NamedTuple):
    """A repository of the hub."""

    repository: str
    """`org/name`"""
    revision: str | None
    """Branch, tag or commit; None means the main branch."""

    @classmethod
    def parse(cls, source: str | Path) -> "HubName | None":
        """Parses a user's input as a hub name; None for an existing path, and for text that cannot be a hub name."""
        match = _NAME.fullmatch(str(source))
        if match is None or Path(source).exists():
            return None
        return cls(match["repository"], match["revision"])

    @property
    def name(self) -> str:
        """Repository name without the organisation."""
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def checkpoint_folder(source: str | Path, with_weights: bool = True) -> Path:
    """Returns a checkpoint's folder; a named checkpoint is fetched into the machine's cache if it is not there.

    Args:
        source: a folder, a GGUF file, `org/name[@revision]` on the hub, or the short name of a published model; an
            existing path with such a name takes precedence.
        with_weights: False fetches only configuration and tokenizer.

    Raises:
        HubError: a hub checkpoint is neither cached nor downloadable.
        ModelCheckpointError: the file is damaged, or a named model is neither cached nor downloadable.
    """
    name = HubName.parse(source)
    if name is not None:
        return _fetch(name, with_weights)
    return first_result("folder_of", Path(source)) or Path(source)


@lru_cache
def _fetch(name: HubName, with_weights: bool) -> Path:
    """Returns the folder of a hub checkpoint, fetching it if necessary.

    Results are cached per process and name, so that all uses get the same commit even if the branch moves.
    """
    from huggingface_hub import constants, snapshot_download

    if with_weights and not constants.HF_HUB_OFFLINE:
        logger.info("There is no folder %s here: fetching it from the Hugging Face hub, unless its cache has it", name)
    try:
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=[*CONFIGS, *(WEIGHTS if with_weights else ())],
            ignore_patterns=list(NEVER),
        )
    except (OSError, ValueError) as error:
        raise HubError(_reason(name, error)) from error
    return _complete(name, Path(folder), with_weights)


def _complete(name: HubName, folder: Path, with_weights: bool) -> Path:
    """Refuses a folder that lacks requested files.

    When offline, huggingface_hub may return such an incomplete folder of the cache.
    """
    if not (folder / "config.json").is_file():
        raise HubError(
            f"{name} of the Hugging Face hub has no config.json: give a repository with a transformers checkpoint"
        )
    if with_weights and not any(folder.glob("*.safetensors")):
        raise HubError(
            f"{name} of the Hugging Face hub has no safetensors in {folder}: fetch them with `hf download "
            f"{name.repository}`; or convert its pickles, if you trust them, and give that folder"
        )
    return folder


def _reason(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    where = f"there is no folder {name} here, and {name} of the Hugging Face hub"
    command = f"`hf download {name.repository}`"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{where} is gated: accept its terms on its page, then set HF_TOKEN to a token of that account "
            "(or run `hf auth login`)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{where} does not exist, or is private: check the name, or set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where}: there is no branch, tag or commit {name.revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"{where} is not in the cache at {constants.HF_HUB_CACHE} and HF_HUB_OFFLINE is set: unset it, or copy "
            f"the cache from a machine that has run {command}, or give a folder"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{where} is not in the cache at {constants.HF_HUB_CACHE}, and the hub cannot be reached: run {command} "
            "where it can be (HF_HUB_OFFLINE=1 then makes a start use only the cache), or give a folder"
        )
    return f"{where} cannot be fetched: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
