"""The head that comes with SmolLM2, by a second path: transformers' verifier and the head's formula written out."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models.published import SMOLLM2
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.named_models.table import MODELS
from wingbeat.runtime.scheduling.request import SamplingParams

HEAD = MODELS["smollm2"].head
CHAIN, NUM_TOKENS = 4, 64
QUESTIONS = (
    "What is the capital of France?",
    "Explain how bread is baked.",
    "Write a Python function that adds two numbers.",
    "Tell me a short story about a lighthouse.",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SMOLLM2.is_here, reason="make test-models fetches the model"),
    pytest.mark.skipif(HEAD is None or not (HEAD / "config.json").is_file(), reason="the head is not trained yet"),
]


class WrittenOut:
    """EAGLE-3 (arXiv 2503.01840) without a cache: every draft reads the whole text before it."""

    def __init__(self, verifier: torch.nn.Module) -> None:
        self.config = json.loads((HEAD / "config.json").read_text())
        self.weights = {name: tensor.float() for name, tensor in load_file(HEAD / "model.safetensors").items()}
        self.embedding = verifier.get_input_embeddings().weight
        self.token_ids = torch.arange(len(self.weights["d2t"])) + self.weights["d2t"].long()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return x * (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt() * weight

    def turned(self, x: Tensor) -> Tensor:
        """Rotary position embeddings of [positions, heads, head_dim]."""
        theta, size = self.config["rope_parameters"]["rope_theta"], x.shape[-1]
        angles = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([part, part], -1)[:, None] for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def hidden(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Last state behind tokens 1..n, each read with the features before it."""
        normed = self.norm("midlayer.input_layernorm", self.embedding[tokens])
        x = torch.cat([normed, self.norm("midlayer.hidden_norm", features)], -1)
        query, key, value = (self.linear(f"midlayer.self_attn.{name}_proj", x) for name in "qkv")
        query, key, value = (part.unflatten(-1, (-1, self.config["head_dim"])) for part in (query, key, value))
        heads = (part.transpose(0, 1)[None] for part in (self.turned(query), self.turned(key), value))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        stream = features[-1] + self.linear("midlayer.self_attn.o_proj", mixed[0].transpose(0, 1).flatten(1)[-1])
        normed = self.norm("midlayer.post_attention_layernorm", stream)
        gate, up = self.linear("midlayer.mlp.gate_proj", normed), self.linear("midlayer.mlp.up_proj", normed)
        return stream + self.linear("midlayer.mlp.down_proj", functional.silu(gate) * up)

    def accepted(self, text: Tensor, taps: Tensor, known: int) -> int:
        """Drafted tokens that are the text's, where the verifier's states of all but the last known token are there."""
        features = self.linear("fc", taps[: known - 1])
        for depth in range(CHAIN):
            state = self.hidden(text[1 : known + depth], features)
            token = self.token_ids[self.linear("lm_head", self.norm("norm", state)).argmax()]
            if known + depth >= len(text) or token != text[known + depth]:
                return depth
            features = torch.cat([features, state[None]])
        return CHAIN


@torch.no_grad()
def test_tokens_a_round_are_those_of_a_plain_forward_pass():
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2.folder)
    verifier = AutoModelForCausalLM.from_pretrained(SMOLLM2.folder, dtype=torch.float32)
    head = WrittenOut(verifier)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    layers = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    rounds = tokens = 0
    for prompt in prompts:
        text = verifier.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)
        states = verifier(text, output_hidden_states=True).hidden_states
        taps = torch.cat([states[layer + 1] for layer in layers], dim=-1)[0]
        known = len(prompt) + 1
        while known < text.shape[1]:
            count = head.accepted(text[0], taps, known) + 1
            rounds, tokens, known = rounds + 1, tokens + count, known + count
    shape = SpeculationConfig(CHAIN, 1, CHAIN + 1)
    llm = LLM(SMOLLM2.folder, str(HEAD), EngineConfig(speculation=shape), InProcessChannel, device="cpu")
    results = llm.generate(prompts, [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)] * len(prompts))
    drafts = sum(result.metrics.num_drafts for result in results)
    served = 1 + sum(result.metrics.num_accepted_tokens for result in results) / drafts
    assert served == pytest.approx(tokens / rounds, abs=0.1)
    assert served > 1.5
