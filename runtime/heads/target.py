"""The verifier as a drafter sees it: shapes and single tensors of a checkpoint, without loading the model."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from wingbeat.runtime.tensor_files import tensor_files


@dataclass(frozen=True)
class TargetDescription:
    """What a drafter must know of the verifier it drafts for."""

    path: Path
    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> "TargetDescription":
        """Read a verifier's folder.

        Raises:
            FileNotFoundError: it holds no config.json.
        """
        if not (Path(path) / "config.json").is_file():
            raise FileNotFoundError(
                f"model directory {path} holds no config.json: give a Hugging Face checkpoint folder"
            )
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        return cls(Path(path), config.hidden_size, config.num_hidden_layers, config.vocab_size)

    @cached_property
    def config(self) -> PretrainedConfig:
        """The text model's configuration."""
        return AutoConfig.from_pretrained(self.path, local_files_only=True).get_text_config()

    @cached_property
    def tensor_files(self) -> dict[str, Path]:
        """The safetensors file of each tensor, by the tensor's name; empty where the checkpoint has another format."""
        return tensor_files(self.path)

    def tensor(self, name: str) -> Tensor:
        """One tensor of the checkpoint.

        Raises:
            KeyError: there is none of that name.
        """
        with safe_open(self.tensor_files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)

    def embedding(self) -> Tensor | None:
        """The verifier's input embedding [vocab_size, hidden_size], for heads that ship without one."""
        return self._ending("embed_tokens.weight")

    def lm_head(self) -> Tensor | None:
        """The verifier's output matrix [vocab_size, hidden_size]; the embedding where the two are tied."""
        return self.embedding() if self.config.tie_word_embeddings else self._ending("lm_head.weight")

    def _ending(self, suffix: str) -> Tensor | None:
        # The shortest name is the model's own: prediction modules hold copies under longer ones.
        names = sorted((name for name in self.tensor_files if name.endswith(suffix)), key=len)
        return self.tensor(names[0]) if names else None
