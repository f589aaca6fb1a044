"""Tiny verifiers with MTP modules in the published tensor names, and the modules' mathematics over full contexts."""

import json
from dataclasses import dataclass

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PreTrainedModel, Qwen3Config

from tests.runtime.models import CONFIGS, HIDDEN_SIZE, VOCAB_SIZE

NUM_LAYERS = 2
_SMALL = {"vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "max_position_embeddings": 512}
_IDS = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
FAMILIES = {
    "deepseek_v3": CONFIGS["deepseek_v3"],
    "glm4_moe": Glm4MoeConfig(
        **_SMALL,
        **_IDS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        use_qk_norm=True,
        initializer_range=0.2,
    ),
    "qwen3": Qwen3Config(
        **_SMALL, **_IDS, num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.2
    ),
}


@dataclass
class Modules:
    """Modules of random weights; layer NUM_LAYERS + k of `model` is module k's."""

    model: PreTrainedModel
    extras: list[dict[str, Tensor]]

    @classmethod
    def random(cls, family: str, count: int) -> "Modules":
        torch.manual_seed(4)
        like = FAMILIES[family].to_dict()
        for name in ("layer_types", "mlp_layer_types"):
            like.pop(name, None)
        config = type(FAMILIES[family])(**(like | {"num_hidden_layers": NUM_LAYERS + count}))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
            elif "bias" in name:
                parameter.data.uniform_(-0.1, 0.1)
        return cls(model, [_random_extras() for _ in range(count)])

    def run(self, index: int, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """A module over rows 0..: tokens index + 1.. and the input of each row -> its normed results."""
        extra, count = self.extras[index], len(token_ids)
        embedded = self.model.get_input_embeddings()(token_ids)
        fused = torch.cat([self._norm(embedded, extra["enorm.weight"]), self._norm(hidden, extra["hnorm.weight"])], -1)
        positions = torch.arange(count)[None] + index + 1
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        inputs = (fused @ extra["eh_proj.weight"].T)[None]
        rotary = self.model.model.rotary_emb(inputs, positions)
        layer = self.model.model.layers[NUM_LAYERS + index]
        out = layer(inputs, attention_mask=mask, position_ids=positions, position_embeddings=rotary)[0]
        return self._norm(out, extra["shared_head.norm.weight"])

    def logits_of(self, tokens: list[int], taps: Tensor):
        """path -> logits of what follows it, behind a sequence with `taps` [len(tokens) - 1, hidden_size]."""
        last = len(self.extras) - 1

        def logits(path: list[int]) -> Tensor:
            known, hidden = torch.tensor([*tokens, *path]), taps
            for index in range(min(len(path), last) + 1):
                inputs = hidden
                hidden = self.run(index, known[index + 1 : index + 1 + len(inputs)], inputs)
            for _ in range(len(path) - last):
                inputs = torch.cat([inputs, hidden[-1:]])
                hidden = self.run(last, known[last + 1 : last + 1 + len(inputs)], inputs)
            return self.model.get_output_embeddings()(hidden[-1])

        return logits

    def save(self, folder, layout: str = "deepseek", copies: bool = True) -> None:
        """The verifier of NUM_LAYERS layers with its modules, in one file.

        Args:
            copies: whether modules bring an embedding and an output matrix of their own.
        """
        self.model.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": len(self.extras)}
        for name in ("layer_types", "mlp_layer_types"):
            if config.get(name):
                config[name] = config[name][:NUM_LAYERS]
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        for index, extra in enumerate(self.extras):
            prefix = f"model.layers.{NUM_LAYERS + index}."
            tensors |= {prefix + name: tensor for name, tensor in extra.items()}
            if copies:
                tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
                tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
        if layout == "qwen":
            tensors = {_qwen(name): tensor for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * weight


def _random_extras() -> dict[str, Tensor]:
    extras = {
        name: torch.rand(HIDDEN_SIZE) + 0.5 for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")
    }
    return extras | {"eh_proj.weight": torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE) * 0.2}


def _qwen(name: str) -> str:
    prefix = f"model.layers.{NUM_LAYERS}."
    names = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "shared_head.norm.weight": "mtp.norm.weight",
    }
    if not name.startswith(prefix):
        return name
    own = name.removeprefix(prefix)
    return names.get(own, f"mtp.layers.0.{own}")
