"""Reads EAGLE-3 heads in GGUF files (llama.cpp's architecture `eagle3`) in the form of SpecForge's layout.

The file lists the layers whose inputs are tapped. Its tensor `d2t` holds target ids, not offsets from draft ids.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wingbeat.runtime.heads.contract import HeadConvention
from wingbeat.runtime.heads.conventions import state
from wingbeat.runtime.hugging_face import first_line
from wingbeat.runtime.quantised.gguf_config import HEAD, Contents, angles_of, fields_of
from wingbeat.runtime.quantised.gguf_file import GgufFile, GgufTensor, read_gguf
from wingbeat.runtime.tensor_files import GGUF_FILE, ModelCheckpointError

_LAYER = "midlayer."
_NAMES = {
    "fc.weight": "fc.weight",
    "d2t": "d2t",
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm.weight": f"{_LAYER}input_layernorm.weight",
    "blk.0.attn_norm_2.weight": f"{_LAYER}hidden_norm.weight",
    "blk.0.attn_q.weight": f"{_LAYER}self_attn.q_proj.weight",
    "blk.0.attn_k.weight": f"{_LAYER}self_attn.k_proj.weight",
    "blk.0.attn_v.weight": f"{_LAYER}self_attn.v_proj.weight",
    "blk.0.attn_output.weight": f"{_LAYER}self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": f"{_LAYER}post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": f"{_LAYER}mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": f"{_LAYER}mlp.up_proj.weight",
    "blk.0.ffn_down.weight": f"{_LAYER}mlp.down_proj.weight",
}
"""Names of a head's tensors, by their names in the file."""
_OF_THE_CONFIG = "rope_freqs.weight"
_TAPS = ("target_layers", "extract_layers")
"""Names of the field with the tapped layers; newer files have the first name."""
_OWN = (*_TAPS, "target_hidden_size", "norm_before_residual")
_TURNED = {"blk.0.attn_q.weight": "attention.head_count", "blk.0.attn_k.weight": "attention.head_count_kv"}
"""Matrices whose rows are in the order of interleaved RoPE (neighbouring pairs), each with the field that states its
number of heads.
"""


def head_fields(file: GgufFile, name: str) -> dict[str, Any]:
    """The fields of config.json.

    Args:
        file: the file's content.
        name: name of the file, for errors.

    Raises:
        ModelCheckpointError: a field is missing or not supported; the message names the field.
    """
    fields, sizes = fields_of(file, name, _OWN)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    taps = next((fields[one] for one in _TAPS if one in fields), None)
    if not isinstance(taps, list) or not all(type(layer) is int for layer in taps):
        raise ModelCheckpointError(f"{name}: {HEAD}.{_TAPS[0]} = {taps!r}, not a list of layers")
    if fields["block_count"] != 1:
        raise ModelCheckpointError(
            f"{name}: {HEAD}.block_count = {fields['block_count']}: only heads with one block are supported"
        )
    contents = Contents(fields, tensors)
    angles = angles_of(contents)
    vocab_size = fields.get("vocab_size") or len(file.fields.get("tokenizer.ggml.tokens") or ())
    norms = bool(fields.get("norm_before_residual"))
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": HEAD,
        **sizes,
        "head_dim": contents.head_dim(),
        "vocab_size": vocab_size,
        "draft_vocab_size": int(tensors["d2t"].shape[0]) if "d2t" in tensors else vocab_size,
        "target_hidden_size": fields.get("target_hidden_size"),
        "rope_parameters": angles,
        "rope_theta": angles["rope_theta"],
        "norm_before_residual": norms,
        **state(HeadConvention(tuple(taps), norm_before_residual=norms)),
    }


def head_shapes(file: GgufFile) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors by their names in a head; an unknown tensor keeps its name in the file."""
    found = {_NAMES.get(one.name, one.name): tuple(map(int, reversed(one.shape))) for one in file.tensors}
    return {name: shape for name, shape in found.items() if name != _OF_THE_CONFIG}


def stored_tensors(folder: Path) -> dict[str, Tensor] | None:
    """Tensors of the GGUF head to which a folder links, with weights in float32; None for other folders.

    Raises:
        ModelCheckpointError: the file is damaged.
    """
    if not (folder / GGUF_FILE).exists():
        return None
    file = read_gguf(folder / GGUF_FILE)
    if file.fields.get("general.architecture") != HEAD:
        return None
    by_name = {_NAMES.get(one.name, one.name): one for one in file.tensors if one.name != _OF_THE_CONFIG}
    found = {}
    for name, tensor in by_name.items():
        try:
            found[name] = _read(tensor, file)
        except (ValueError, LookupError, TypeError, RuntimeError) as error:
            where = f"{tensor.file.resolve()}: tensor {tensor.name}"
            raise ModelCheckpointError(f"{where} cannot be read: {first_line(error)}") from error
    return found


def _read(tensor: GgufTensor, file: GgufFile) -> Tensor:
    from gguf import dequantize

    if tensor.name == "d2t":
        ids = torch.from_numpy(tensor.data.astype(np.int64)).flatten()
        return ids - torch.arange(len(ids))
    made = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)).view(
        *map(int, reversed(tensor.shape))
    )
    if tensor.name not in _TURNED:
        return made
    heads = file.fields.get(f"{HEAD}.{_TURNED[tensor.name]}", file.fields[f"{HEAD}.attention.head_count"])
    return made.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
