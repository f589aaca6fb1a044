"""GGUF files of tiny random models."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.runtime.models import random_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*ALPHABET, "he", "ll", "hell", "<|im_start|>", "<|im_end|>"]
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the scales of a block lie, by the forms that the package only reads."""
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def name_of(name: str) -> str:
    """A tensor of Llama as GGUF calls it."""
    name, _, end = name.rpartition(".")
    layer = name.split(".")[2] if name.startswith("model.layers.") else None
    own = NAMES[name if layer is None else name.split(".", 3)[3]]
    return f"{own}.{end}" if layer is None else f"blk.{layer}.{own}.{end}"


def turned(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of queries or keys as GGUF has them: pairs of a head side by side."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray:
    """Blocks of a form that the package only reads: any numbers, with small scales.

    Args:
        shape: of the matrix [columns, inputs].
    """
    inputs, size = GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(shape[0])
    blocks = chance.integers(0, 256, (shape[0], shape[1] // inputs, size), dtype=np.uint8)
    for begin in SCALES_AT[kind.name]:
        scales = chance.uniform(0.5, 1, blocks.shape[:2]).astype(np.float16) / np.float16(2**11)
        blocks[:, :, begin : begin + 2] = scales[:, :, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_tokens(writer: GGUFWriter, pre: str = "smollm") -> None:
    """A tokenizer of bytes and two pairs."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.NORMAL] * (len(TOKENS) - 2) + [TokenType.CONTROL] * 2)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(len(TOKENS) - 1)
    writer.add_chat_template(TEMPLATE)


def write_model(
    file: Path,
    form: str,
    pre: str = "smollm",
    tied: bool = False,
    others: Mapping[str, str] = MappingProxyType({}),
    parts: int = 1,
) -> LlamaForCausalLM:
    """Write a Llama whose matrices are of a form, and return it with the numbers that they stand for.

    Args:
        others: forms of some kinds of its matrices, such as `up_proj`.
        parts: files that it is split into.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if form in SCALES_AT else {}
    model = random_model("llama", vocab_size=len(TOKENS), tie_word_embeddings=tied, **sizes)
    config = model.config
    count = len(list(model.parameters()))
    writer = GGUFWriter(str(file), "llama", split_max_tensors=-(-count // parts) if parts > 1 else 0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(len(TOKENS))
    write_tokens(writer, pre)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                writer.add_tensor(name_of(name), parameter.numpy())
                continue
            kind = GGMLQuantizationType[others.get(name.split(".")[-2], form)]
            known = kind.name in SCALES_AT
            blocks = random_blocks(parameter.shape, kind) if known else quantize(parameter.numpy(), kind)
            parameter.copy_(torch.from_numpy(dequantize(blocks, kind)))
            count = heads.get(name.split(".")[-2])
            if count is not None:
                blocks = turned(torch.from_numpy(blocks), count).numpy()
            writer.add_tensor(name_of(name), np.ascontiguousarray(blocks), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
