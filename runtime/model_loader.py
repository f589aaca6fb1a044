"""Any Hugging Face causal LM as the verifier: load, probe, and refuse what our attention function would get wrong."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from wingbeat.kernels.attention import masked_attention
from wingbeat.runtime.attention import ATTENTION_NAME, LayerAttention
from wingbeat.runtime.fused_norm import fuse_norms
from wingbeat.runtime.fused_rope import fuse_rope
from wingbeat.runtime.linear_layout import lay_out_linears
from wingbeat.runtime.verifier_checkpoint import check_files, check_finite, load_weights
from wingbeat.runtime.verifier_config import ConfigFile, load_config, one_line

logger = logging.getLogger(__name__)

PROBE_NAME = "wingbeat_probe"
PROBE_KEYWORD = "wingbeat_recorder"


class UnsupportedModelError(ValueError):
    """The architecture cannot be served without silent errors; the message names it and says why."""


@dataclass
class LoadedModel:
    """A verifier ready for the runner."""

    model: PreTrainedModel
    name: str
    layers: list[LayerAttention]
    decoder: nn.Module
    """Owns the layers; its output is the final norm's."""
    decoder_layers: nn.ModuleList
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV."""
        return next(self.model.parameters()).dtype

    @property
    def windows(self) -> tuple[int, ...]:
        """Distinct sliding windows over the layers; 0 stands for none."""
        return tuple(sorted({layer.sliding_window or 0 for layer in self.layers}))


@dataclass
class Recorder:
    """What the probe's attention function saw, by layer index."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    recorder: Recorder = kwargs[PROBE_KEYWORD]
    recorder.layers[module.layer_idx] = LayerAttention(
        query.shape[1], key.shape[1], key.shape[3], value.shape[3], sliding_window
    )
    num_tokens = query.shape[2]
    mask = torch.full((num_tokens, num_tokens), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
    out = masked_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask.triu(1)[None],
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap,
        s_aux,
    )
    return out, None


AttentionInterface.register(PROBE_NAME, _probe_attention)


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a checkpoint directory and prepare it for the runner.

    Raises:
        ModelCheckpointError: a file, a field or a tensor is wrong; one line that names it.
        UnsupportedModelError: see `prepare_model`.
    """
    file = ConfigFile.read(Path(path))
    load_config(file)
    check_files(file)
    model = load_weights(file, dtype).to(device)
    check_finite(model)
    with one_line(file.name):
        return prepare_model(model, Path(path).name)


def prepare_model(model: PreTrainedModel, name: str) -> LoadedModel:
    """Probe a model's attention, compare it with transformers' eager path, and switch it to ours.

    Raises:
        UnsupportedModelError: some layers never call the attention function (recurrent or linear-attention hybrids,
            models with attention code of their own), or the outputs disagree.
    """
    model.eval().requires_grad_(False)
    config = model.config.get_text_config()
    layers = probe_attention(model)
    hidden_size = config.hidden_size
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)
    limit = getattr(config, "max_position_embeddings", None) or 2**31
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None:
        # Chunked attention (Llama 4) equals full attention up to one chunk; our masks know windows, not chunks.
        limit = min(limit, chunk)
    model.set_attn_implementation(ATTENTION_NAME)
    fuse_norms(model)
    fuse_rope(model)
    lay_out_linears(model)
    decoder_layers = _decoder_layers(model, len(layers))
    return LoadedModel(
        model=model,
        name=name,
        layers=layers,
        decoder=next(module for module in model.modules() if decoder_layers in list(module.children())),
        decoder_layers=decoder_layers,
        hidden_size=hidden_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_position_embeddings=limit,
        eos_token_ids=eos_ids,
    )


@torch.inference_mode()
def probe_attention(model: PreTrainedModel) -> list[LayerAttention]:
    """Run three tokens through a recording attention function and through eager attention.

    Raises:
        UnsupportedModelError: a layer was not seen, or the two disagree.
    """
    config = model.config.get_text_config()
    name, num_layers = _architecture(model.config), config.num_hidden_layers
    device = next(model.parameters()).device
    token_ids = torch.tensor([[1, 2, 3]], device=device) % model.get_output_embeddings().weight.shape[0]
    arguments = {"input_ids": token_ids, "position_ids": torch.arange(3, device=device)[None], "use_cache": False}
    recorder = Recorder()
    try:
        model.set_attn_implementation(PROBE_NAME)
        probed = model(**arguments, **{PROBE_KEYWORD: recorder}).logits
    except (TypeError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{name} does not take a custom attention function: {error}") from error
    missing = sorted(set(range(num_layers)) - recorder.layers.keys())
    if missing:
        raise UnsupportedModelError(
            f"{name}: layers {missing} never call the attention function (recurrent state or attention code of their "
            "own); such hybrids cannot be verified as a tree and are not supported"
        )
    model.set_attn_implementation("eager")
    expected = model(**arguments).logits
    error = (probed - expected).abs().max().item()
    tolerance = (1e-3 if probed.dtype == torch.float32 else 5e-2) * max(expected.abs().max().item(), 1.0)
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"{name}: logits differ by {error:.2e} from transformers' eager attention; it uses something our "
            "attention function does not know"
        )
    return [recorder.layers[index] for index in range(num_layers)]


def _architecture(config: Any) -> str:
    names = getattr(config, "architectures", None)
    return names[0] if names else type(config).__name__


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """The decoder's own layer list: the outermost ModuleList whose members hold one attention module each."""
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            owners = [{m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")} for layer in module]
            if all(owner == {index} for index, owner in enumerate(owners)):
                return module
    raise UnsupportedModelError(f"{_architecture(model.config)}: its decoder layers were not found")
