"""Which drafter a name or a folder means; kinds are imported only when asked for."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter


@dataclass(frozen=True)
class TargetDescription:
    """What a drafter must know of the verifier it drafts for; found without loading the verifier."""

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

    def embedding(self) -> Tensor | None:
        """The verifier's input embedding [vocab_size, hidden_size], for heads that ship without one."""
        for file in sorted(self.path.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if name.endswith("embed_tokens.weight"):
                        return tensors.get_tensor(name)
        return None


def load_drafter(
    name: str | Path,
    target: TargetDescription,
    speculation: SpeculationConfig,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    cuda_graphs: bool = True,
) -> Drafter | None:
    """Build the drafter that `name` means: "none", "ngram", or a folder with an EAGLE-3 head.

    Args:
        cuda_graphs: on CUDA, capture an EAGLE drafter's passes.

    Returns:
        None for "none".

    Raises:
        ValueError: the name is neither a known kind nor a folder, or the checkpoint cannot be used.
    """
    if str(name) == "none":
        return None
    if str(name) == "ngram":
        from wingbeat.runtime.drafters.ngram import NgramDrafter

        return NgramDrafter(speculation)
    if not Path(name).is_dir():
        raise ValueError(f"drafter {str(name)!r} is neither 'ngram', 'none' nor a folder with an EAGLE head")
    from wingbeat.runtime.drafters.checkpoint import load_eagle_head
    from wingbeat.runtime.drafters.eagle import EagleDrafter
    from wingbeat.runtime.graph_device import CudaGraphDevice

    head = load_eagle_head(
        name,
        target_hidden_size=target.hidden_size,
        target_num_layers=target.num_layers,
        target_vocab_size=target.vocab_size,
        target_embedding=target.embedding(),
        dtype=dtype,
        device=device,
    )
    captured = cuda_graphs and head.draft_token_ids.is_cuda
    return EagleDrafter(head, speculation, CudaGraphDevice(head.draft_token_ids.device) if captured else None)
