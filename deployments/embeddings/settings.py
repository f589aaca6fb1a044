"""The setting `embeddings`, and the embeddings that a model's files specify."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import Field

from wingbeat.deployments.options.panel_titles import FEATURES
from wingbeat.runtime.pooling.pooling import Pooling
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig

POOLING_FILE = Path("1_Pooling") / "config.json"
"""Path of the pooling config below the folder of an embedding model, in the layout of sentence-transformers."""
_MODES = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_lasttoken": Pooling.LAST}
MOST_HIDDEN = 16_384
"""Assumed number of dimensions of an embedding if config.json does not state the hidden size; an upper bound, used for
the size of answers.
"""


class EmbeddingKind(NamedTuple):
    """Pooling and size of a model's embeddings."""

    pooling: Pooling | None = None
    """How hidden states are pooled; None if the model has no embeddings."""
    can_be_cut: bool = False
    """Whether the model was trained so that the first numbers of an embedding are an embedding themselves
    (Matryoshka).
    """
    num_numbers: int = 1
    """Number of dimensions of an embedding that is not shortened."""


NO_EMBEDDINGS = EmbeddingKind()
_DESCRIPTION = (
    "Pooling of /v1/embeddings: 'mean' of the model's last hidden states or the 'last' one, normalised to length 1; "
    f"'none' serves no embeddings. 'auto' reads {POOLING_FILE} in the model's folder, and is none without that file."
)
_FIELD = Field("auto", description=_DESCRIPTION, json_schema_extra={"panel": FEATURES})
SETTINGS = {"embeddings": (Literal["auto", "none", "mean", "last"], _FIELD)}


def check_settings(config: "AppConfig") -> None:
    """Raise ValueError if embeddings are requested from an engine that does not expose hidden states."""
    if config.embeddings in ("mean", "last") and not config.is_wingbeats_own():
        raise ValueError(
            f"embeddings is {config.embeddings}: engines other than Wingbeat's own expose no hidden states"
        )


def pooling_of(config: "AppConfig") -> Pooling | None:
    """Return how the hidden states of a prompt are pooled to the prompt's embedding; None if the model has no
    embeddings.

    Raises:
        ValueError: the model's folder specifies an unsupported pooling.
    """
    if config.embeddings == "none" or not config.is_wingbeats_own():
        return None
    if config.embeddings != "auto":
        return Pooling(config.embeddings)
    said = _read(config.model_dir(with_weights=False) / POOLING_FILE)
    modes = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
    if not modes:
        return None
    if len(modes) > 1 or modes[0] not in _MODES:
        raise ValueError(f"embeddings is auto: {POOLING_FILE} has {', '.join(modes)}; give mean, last or none")
    return _MODES[modes[0]]


def embedding_kind_of(config: "AppConfig") -> EmbeddingKind:
    """Return the kind of a model's embeddings; raises the ValueError of `pooling_of`."""
    pooling = pooling_of(config)
    if pooling is None:
        return NO_EMBEDDINGS
    folder = config.model_dir(with_weights=False)
    said = _read(folder / "config.json")
    can_be_cut = bool(said.get("is_matryoshka") or said.get("matryoshka_dimensions"))
    return EmbeddingKind(pooling, can_be_cut, ConfigFile.read(folder).size("hidden_size") or MOST_HIDDEN)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    said = json.loads(path.read_text(encoding="utf-8"))
    return said if isinstance(said, dict) else {}
