"""Tokens per round of a trained head, recomputed with transformers' texts and taps and EAGLE's formula in float64."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runtime.eagle_formula import Formula, Recipe
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import SamplingParams

CHAIN, NEW_TOKENS = 4, 24
PROMPTS = (
    "def add(first, second):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def ",
)
NAMES = {
    **{name: f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"},
    **{name: f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{
        "input_norm_of_layer": "midlayer.input_layernorm.weight",
        "post_norm": "midlayer.post_attention_layernorm.weight",
    },
    **{"hidden_norm": "midlayer.hidden_norm.weight", "fc": "fc.weight", "norm": "norm.weight"},
    **{"lm_head": "lm_head.weight", "d2t": "d2t"},
}
"""Names of tensors in SpecForge's files, by the formula's names."""


@torch.no_grad()
def accepted_by_formula(verifier: Path, head: Path, prompts: list[list[int]]) -> tuple[list[list[int]], int, int]:
    """Texts, drafts and accepted tokens of greedy rounds of chains."""
    model = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    fields, files = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    weights = {name: files[stored].double() for name, stored in NAMES.items()}
    weights["embed"] = model.get_input_embeddings().weight.double()
    recipe = Recipe(
        hidden=fields["hidden_size"],
        target_hidden=fields["target_hidden_size"],
        heads=fields["num_attention_heads"],
        kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        intermediate=fields["intermediate_size"],
        eps=fields["rms_norm_eps"],
        theta=fields["rope_parameters"]["rope_theta"],
    )
    layers = fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    texts, drafts, accepted = [], 0, 0
    for prompt in prompts:
        ends = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS + CHAIN, **ends)[0]
        texts.append(text[len(prompt) :][:NEW_TOKENS].tolist())
        states = model(text[None], output_hidden_states=True).hidden_states
        # Layers are counted by what enters them; the file names the layer before.
        taps = torch.cat([states[layer + 1][0] for layer in layers], dim=-1)
        formula, committed, tokens = Formula(recipe, weights), len(prompt), text.tolist()
        while committed < len(prompt) + NEW_TOKENS - 1:
            # The committed token has no state of the verifier yet: the head reads it with the one before it.
            while len(formula.pairs) < committed:
                position = len(formula.pairs)
                hidden = formula.known(tokens[position + 1], taps[position])
            known, chain = list(formula.pairs), []
            for _ in range(CHAIN):
                chain.append(int(formula.target_ids()[formula.logits(hidden).argmax()]))
                hidden = formula.drafted(chain[-1], hidden)
            formula.pairs = known
            right = next((i for i, one in enumerate(chain) if one != tokens[committed + 1 + i]), CHAIN)
            drafts, accepted, committed = drafts + 1, accepted + right, committed + right + 1
    return texts, drafts, accepted


def test_the_demo_heads_rounds_are_those_of_the_formula():
    demo = demo_pair()
    tokenizer = AutoTokenizer.from_pretrained(demo.verifier)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    config = EngineConfig(max_num_seqs=2, max_model_len=256, speculation=SpeculationConfig(CHAIN, 1, CHAIN + 1))
    llm = LLM(demo.verifier, demo.drafter, config, InProcessChannel, device="cpu", dtype="float32")
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    results = llm.generate(prompts, [params, params])
    texts, drafts, accepted = accepted_by_formula(demo.verifier, demo.drafter, prompts)
    assert [result.token_ids for result in results] == texts
    assert sum(result.metrics.num_accepted_tokens for result in results) == accepted
    assert sum(result.metrics.num_drafts for result in results) == drafts
    assert accepted > drafts, "a trained head is right more often than once a round"
