"""Checkpoints by their names on the Hugging Face hub, `org/name[@revision]`, through the cache of huggingface_hub.

Weights come as safetensors only. Pickles and code are never fetched.
"""

import logging
import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from wingbeat.runtime.parts import first
from wingbeat.runtime.tensor_files import ModelCheckpointError

logger = logging.getLogger(__name__)
WEIGHTS = ("*.safetensors",)
CONFIGS = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""Small files: configurations, indices of shards, tokenizers, chat templates."""
NEVER = ("*/*", "consolidated*")
"""Other formats of the same weights: in folders of their own, or in Mistral's files beside the shards."""
_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")


class HubError(ModelCheckpointError):
    """A checkpoint of the hub is not to be had; one line that says what to do."""


class HubName(NamedTuple):
    """A repository of the hub."""

    repository: str
    """`org/name`"""
    revision: str | None
    """A branch, a tag or a commit; None is the main branch."""

    @classmethod
    def parse(cls, source: str | Path) -> "HubName | None":
        """The name that a user's word is; None for a path that is there, and for what can be no name of the hub."""
        match = _NAME.fullmatch(str(source))
        if match is None or Path(source).exists():
            return None
        return cls(match["repository"], match["revision"])

    @property
    def name(self) -> str:
        """The part behind the organisation."""
        return self.repository.partition("/")[2]

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def checkpoint_folder(source: str | Path, with_weights: bool = True) -> Path:
    """The folder of a checkpoint; of one that has a name, the one in this machine's cache, fetched if need be.

    Args:
        source: a folder, a GGUF file, `org/name[@revision]` of the hub, or the short name of a published model; what
            is here by that name comes first.
        with_weights: False where configuration and tokenizer will do.

    Raises:
        HubError: it has a name of the hub and is neither in the cache nor to be fetched.
        ModelCheckpointError: the file is damaged, or the named model neither in the cache nor to be fetched.
    """
    name = HubName.parse(source)
    if name is not None:
        return _fetch(name, with_weights)
    return first("folder_of", Path(source)) or Path(source)


@lru_cache
def _fetch(name: HubName, with_weights: bool) -> Path:
    """Once per process, so that a branch that moves meanwhile is one commit."""
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
    """Refuse a folder that lacks what was asked for: huggingface_hub gives what its cache has where it is offline."""
    if not (folder / "config.json").is_file():
        raise HubError(f"{name} of the Hugging Face hub has no config.json: it must hold a checkpoint of transformers")
    if with_weights and not any(folder.glob("*.safetensors")):
        raise HubError(
            f"{name} of the Hugging Face hub has no safetensors in {folder}: fetch them with `hf download "
            f"{name.repository}`; of a repository that has none, trust and convert the pickles, then give the folder"
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
            "where it can be (HF_HUB_OFFLINE=1 then keeps a start from asking it), or give a folder"
        )
    return f"{where} cannot be fetched: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
