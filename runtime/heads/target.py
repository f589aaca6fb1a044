"""The description of a verifier that its drafter needs: shapes and single tensors of its checkpoint, read without
loading the model.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.hugging_face import read_config
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensor_files import read_fields, tensor_files, text_fields

logger = logging.getLogger(__name__)
EMBEDDING, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
"""Suffixes of the names of embedding and output matrix in checkpoints."""
Lender = Callable[[str], Tensor | None]
"""Function (suffix of a tensor's name) -> that weight of a verifier that runs on the drafter's device, or None if the
verifier does not lend the weight. The weight must not be written.
"""
_COMPARED_ROWS = 64
"""Number of rows of a lent weight that are compared with the file. The comparison is needed because the memory that
another process shares may not contain the weight.
"""


@dataclass(frozen=True)
class TargetDescription:
    """Properties of a verifier that its drafter needs."""

    path: Path
    hidden_size: int
    num_layers: int
    vocab_size: int
    lender: Lender | None = None
    """Function that lends the verifier's weights, which the drafter would otherwise load from the files again."""
    newer: dict[str, Tensor] = field(default_factory=dict, compare=False)
    """Weights by suffix that have replaced those of the files since the verifier was loaded."""
    copied: set[str] = field(default_factory=set, init=False, compare=False)
    """Suffixes of the weights of which a head holds copies, which therefore miss later changes of the verifier."""
    _shared: dict[str, Tensor] = field(default_factory=dict, init=False, compare=False)
    """Lent weights that a head uses. Later heads use the same tensors, because a swap of heads would otherwise copy
    other numbers into the verifier's memory."""

    @classmethod
    def from_checkpoint(cls, path: str | Path, lender: Lender | None = None) -> "TargetDescription":
        """Read a verifier's checkpoint.

        Args:
            path: folder or name, as accepted by `checkpoint_folder`.
            lender: see the field `lender`.

        Raises:
            FileNotFoundError: the folder has no config.json.
            ModelCheckpointError: as for `checkpoint_folder` and `read_config`.
        """
        folder = checkpoint_folder(path)
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"model directory {path} holds no config.json: give a Hugging Face checkpoint folder"
            )
        config = read_config(folder).get_text_config()
        return cls(folder, config.hidden_size, config.num_hidden_layers, config.vocab_size, lender)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The text model's configuration."""
        return read_config(self.path).get_text_config()

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The quantisation fields of config.json, in the form in which a head's config has them.

        Empty if the weights are not quantised.
        """
        fields = read_fields(self.path / "config.json")
        found = fields.get("quantization_config") or text_fields(fields).get("quantization_config")
        return {} if found is None else {"quantization_config": found}

    @cached_property
    def tensor_files(self) -> dict[str, Path]:
        """The safetensors file of each tensor by tensor name; empty if the checkpoint has another format."""
        return tensor_files(self.path)

    @cached_property
    def _read_apart(self) -> Mapping[str, Callable[[], Tensor]]:
        """Functions that read embedding and output matrix, by name, if an optional part reads the checkpoint's format;
        else empty.
        """
        return first_result("lent_tensors", self.path) or {}

    def _names_ending(self, suffix: str) -> list[str]:
        # The shortest name comes first, because it is the name of the model's tensor; copies in MTP modules have longer
        # names.
        names = (*self.tensor_files, *self._read_apart)
        return sorted((name for name in names if name.endswith(suffix)), key=len)

    def tensor(self, name: str) -> Tensor:
        """Read a single tensor of the checkpoint.

        Raises:
            KeyError: no tensor has this name.
        """
        if name in self._read_apart:
            return self._read_apart[name]()
        with safe_open(self.tensor_files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def embedding(self) -> Tensor | None:
        """The verifier's input embedding [vocab_size, hidden_size], for heads whose files contain no embedding."""
        return self._ending(EMBEDDING)

    def lm_head(self) -> Tensor | None:
        """The verifier's output matrix [vocab_size, hidden_size]; the embedding if the two are tied."""
        return self.embedding() if self.config.tie_word_embeddings else self._ending(LM_HEAD)

    def _ending(self, suffix: str) -> Tensor | None:
        if suffix in self._shared:
            return self._shared[suffix]
        names = self._names_ending(suffix)
        if not names:
            return None
        if suffix in self.newer:
            self.copied.add(suffix)
            return self.newer[suffix]
        lent = None if self.lender is None or names[0] in self._read_apart else self.lender(suffix)
        if lent is not None and self._is_of_file(lent, names[0]):
            logger.info("the drafter shares the verifier's %s (%.2f GB)", suffix, lent.nbytes / 1e9)
            self._shared[suffix] = lent
            return lent
        if lent is not None:
            logger.warning("the drafter loads its own copy of %s: the verifier's differs from the file's", names[0])
        self.copied.add(suffix)
        return self.tensor(names[0])

    def _is_of_file(self, lent: Tensor, name: str) -> bool:
        """Whether a lent weight has the same shape as in the file, and the same values in sampled rows, including the
        first and the last row.
        """
        with safe_open(self.tensor_files[name], framework="pt") as tensors:
            stored = tensors.get_slice(name)
            if tuple(stored.get_shape()) != tuple(lent.shape):
                return False
            rows = torch.linspace(0, len(lent) - 1, min(_COMPARED_ROWS, len(lent)), dtype=torch.float64).long()
            expected = torch.cat([stored[row : row + 1].to(lent.dtype) for row in rows.tolist()])
        return torch.equal(lent[rows.to(lent.device)].cpu(), expected)
