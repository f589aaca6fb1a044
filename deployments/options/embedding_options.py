"""What an operator can set about embeddings, and what a model's own files say of them."""

import json
from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from wingbeat.deployments.options.model_options import ModelOptions
from wingbeat.runtime.scheduling.request import Pooling

POOLING_FILE = Path("1_Pooling") / "config.json"
"""Of an embedding model in the layout of sentence-transformers."""
_MODES = {"pooling_mode_mean_tokens": Pooling.MEAN, "pooling_mode_lasttoken": Pooling.LAST}


class EmbeddingOptions(ModelOptions):
    """The part of `AppConfig` that says which embeddings a model has."""

    embeddings: Literal["auto", "none", "mean", "last"] = Field(
        "auto",
        description="What /v1/embeddings answers: the model's last hidden states, their mean or the last one, with "
        f"length 1. 'auto' is what {POOLING_FILE} of the model's folder says, and none without it.",
    )

    @model_validator(mode="after")
    def _check_embeddings(self) -> Self:
        if self.embeddings in ("mean", "last") and not self._is_wingbeats_own():
            raise ValueError(
                f"embeddings is {self.embeddings}: engines other than Wingbeat's own show no hidden states"
            )
        return self

    @abstractmethod
    def _is_wingbeats_own(self) -> bool:
        """Whether Wingbeat's own engine runs the model."""

    def pooling(self) -> Pooling | None:
        """How a prompt's hidden states become its embedding; None where the model has none.

        Raises:
            ValueError: the model's folder says what is not served.
        """
        if self.embeddings == "none" or not self._is_wingbeats_own():
            return None
        if self.embeddings != "auto":
            return Pooling(self.embeddings)
        said = _read(self.model_dir(with_weights=False) / POOLING_FILE)
        modes = [name for name, value in said.items() if name.startswith("pooling_mode_") and value is True]
        if not modes:
            return None
        if len(modes) > 1 or modes[0] not in _MODES:
            raise ValueError(f"embeddings is auto: {POOLING_FILE} has {', '.join(modes)}; give mean, last or none")
        return _MODES[modes[0]]

    def cuts_embeddings(self) -> bool:
        """Whether the model was trained so that the first numbers of an embedding are one, too."""
        said = _read(self.model_dir(with_weights=False) / "config.json")
        return bool(said.get("is_matryoshka") or said.get("matryoshka_dimensions"))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    said = json.loads(path.read_text(encoding="utf-8"))
    return said if isinstance(said, dict) else {}
