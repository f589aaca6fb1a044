"""Tiny random verifiers of many architectures, their reference continuations, and short ways to run an engine."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.near_ties import ROUNDING
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, RequestOutput, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import LoadedModel, load_model, prepare_model

VOCAB_SIZE = 97
HIDDEN_SIZE = 64
NUM_TOKENS = 80
"""Tokens in a reference after each prompt: several windows, and a whole number of paths of 6 between two tokens."""
WINDOW = 16
PROMPT_LENS = (5, 17, 40, 3, 64, 9, 33, 21)
DEMO_PAIR = Path(__file__).parents[2] / "examples" / "demo_pair"
DEMO_TEXTS = (
    "import os",
    "def parse_headers(fp, _class=HTTPMessage):\n    ",
    "class Queue:\n    def __init__(self, maxsize=0):\n        self.maxsize = maxsize\n",
    "    try:\n        return self._cache[key]\n    except KeyError:\n",
    "# Copyright",
    "def test_add(self):\n    self.assertEqual(1 + 2, 3)\n    ",
    "for name, value in sorted(options.items()):\n    if not isinstance(value, str):\n",
    '"""Support for regular expressions.\n\nThis module provides ',
)
CHAIN = SpeculationConfig(draft_top_k=1)
TREE = SpeculationConfig()

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough that the gap between the two best tokens is far above the rounding of float32.
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    # A tied head echoes the last token, so that every text would be one token over and over.
    "tie_word_embeddings": False,
}
_LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16, layer_types=_LAYER_TYPES),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **_EXPERTS),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=3.0),
    "gpt_oss": GptOssConfig(
        **SHAPE, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, rope_parameters={"rope_theta": 1e4}
    ),
    "deepseek_v3": DeepseekV3Config(**(SHAPE | {"head_dim": 8, "num_key_value_heads": 4}), **_LATENT),
}

SEEDS = {"qwen3": 2, "gemma3": 2, "qwen3_moe": 2, "gemma2": 1}
"""Seeds of the weights, 0 by default: with other seeds greedy text falls into one-token loops sooner."""


@dataclass
class Reference:
    """A verifier and what transformers' own greedy decoding says it writes."""

    name: str
    loaded: LoadedModel
    prompts: list[list[int]]
    continuations: list[list[int]] = field(default_factory=list)
    """NUM_TOKENS tokens after each prompt."""
    smallest_gap: float = float("inf")
    """Between the best two logits, over all those tokens."""

    @property
    def sequences(self) -> list[list[int]]:
        """Prompts with their continuations."""
        return [prompt + more for prompt, more in zip(self.prompts, self.continuations, strict=True)]


def random_model(name: str, **overrides) -> PreTrainedModel:
    """A verifier with random weights; `overrides` replace fields of its config."""
    torch.manual_seed(SEEDS.get(name, 0))
    # A config belongs to one model: setting a model's attention writes into it.
    config = type(CONFIGS[name])(**(CONFIGS[name].to_dict() | overrides))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def of_type(name: str) -> PreTrainedModel:
    """A model of a family that CONFIGS has not."""
    torch.manual_seed(0)
    return add_noise(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE), dtype=torch.float32).eval())


def noisy(name: str, **overrides) -> PreTrainedModel:
    """A model whose norms and biases are not what a fresh one has."""
    model = random_model(name, **overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def add_noise(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to the model, so that no weights are negligibly small."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif float(parameter.std()) < 0.1:
                parameter.copy_(0.2 * noise)
    return model


def random_prompts(lens: tuple[int, ...], vocab_size: int = VOCAB_SIZE, seed: int = 1) -> list[list[int]]:
    """Uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lens]


@cache
def reference(name: str, num_tokens: int = NUM_TOKENS) -> Reference:
    """A model of CONFIGS with random prompts, or the demo pair's verifier with code to complete."""
    if name == "demo":
        loaded = load_model(DEMO_PAIR / "verifier", torch.float32, torch.device("cpu"))
        tokenizer = Tokenizer.load(DEMO_PAIR / "verifier")
        prompts = [tokenizer.encode(text) for text in DEMO_TEXTS]
    else:
        loaded = prepare_model(random_model(name), name)
        prompts = random_prompts(PROMPT_LENS)
    return Reference(name, loaded, prompts, *greedy(loaded.model, prompts, num_tokens))


def greedy(model: PreTrainedModel, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
    """`num_tokens` tokens behind each prompt by transformers' generate() on its own attention code, all prompts in one
    batch with padding before the short ones; and the smallest gap between the best two logits.

    Raises:
        AssertionError: the gap is within rounding, so that another implementation may well write another text.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    longest = max(map(len, prompts))
    padding = [longest - len(prompt) for prompt in prompts]
    out = model.generate(
        torch.tensor([[0] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]),
        attention_mask=torch.arange(longest).ge(torch.tensor(padding)[:, None]).long(),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    model.set_attn_implementation(before)
    return out.sequences[:, longest:].tolist(), settled(out.logits)


def settled(logits: tuple[Tensor, ...]) -> float:
    """The smallest gap between the best two logits; raises AssertionError where rounding may close it.

    Args:
        logits: float32 [num_reqs, vocab_size] of each token.
    """
    best = torch.cat(logits).topk(2, dim=-1).values
    gap = (best[:, 0] - best[:, 1]).min().item()
    assert gap > ROUNDING, f"two tokens are as likely but for {gap:.1e}: take other prompts, or weights of another seed"
    return gap


def random_head(
    loaded: LoadedModel, seed: int = 3, draft_vocab_size: int | None = None, hidden_size: int = 32
) -> EagleHead:
    """An EAGLE-3 head of random weights for a verifier; a smaller draft vocabulary takes every other token."""
    torch.manual_seed(seed)
    size = draft_vocab_size or loaded.vocab_size
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=hidden_size,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            target_hidden_size=loaded.hidden_size,
            tap_layers=tuple(range(1, min(4, len(loaded.layers)))),
            vocab_size=loaded.vocab_size,
            draft_vocab_size=size,
        )
    )
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    if size < loaded.vocab_size:
        head.draft_token_ids.copy_(torch.arange(size) * 2)
    return head.eval()


def eagle_drafter(loaded: LoadedModel, speculation: SpeculationConfig, seed: int = 3) -> EagleDrafter:
    """An EAGLE drafter with random weights."""
    return EagleDrafter(random_head(loaded, seed), speculation)


def engine_config(speculation: SpeculationConfig = TREE, **overrides) -> EngineConfig:
    """Limits for tests: 8 sequences of 256 tokens."""
    fields = {"max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64, "num_kv_blocks": 200}
    return EngineConfig(**(fields | {"speculation": speculation} | overrides))


def new_engine(
    loaded: LoadedModel, config: EngineConfig, drafter: Drafter | None = None, on_host: bool | None = None
) -> Engine:
    """An engine over its drafter, both in this thread; `on_host` False takes the fixed shapes of an accelerator."""
    return build_engine(loaded, config, drafter, InProcessChannel, on_host=on_host)


def greedy_params(max_tokens: int = NUM_TOKENS, **fields) -> SamplingParams:
    """Greedy, up to exactly `max_tokens` tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields)


class Run:
    """Requests through an engine: tokens and last outputs by prompt."""

    def __init__(self, engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> None:
        self.engine = engine
        many = params if isinstance(params, list) else [params] * len(prompts)
        for index, (prompt, param) in enumerate(zip(prompts, many, strict=True)):
            engine.add_request(Request(str(index), tuple(prompt), param))
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.last: dict[int, RequestOutput] = {}

    def step(self) -> None:
        """Run a round."""
        for output in self.engine.step():
            self.tokens[int(output.request_id)] += output.token_ids
            if output.finish_reason is not None:
                self.last[int(output.request_id)] = output

    def finish(self) -> list[list[int]]:
        """All rounds; the engine's books must balance afterwards and its hooks are removed by `close`."""
        while self.engine.has_unfinished_requests():
            self.step()
        self.engine.check_integrity()
        return self.tokens


def generate(
    loaded: LoadedModel,
    config: EngineConfig,
    drafter: Drafter | None,
    prompts: list[list[int]],
    params: SamplingParams | list[SamplingParams],
) -> tuple[list[list[int]], Engine]:
    """Tokens of a fresh engine, and the engine; the model is free for the next one."""
    engine = new_engine(loaded, config, drafter)
    try:
        return Run(engine, prompts, params).finish(), engine
    finally:
        engine.model.remove_taps()


def softmax(logits: Tensor) -> Tensor:
    """Exact probabilities, in double."""
    return logits.double().softmax(dim=-1)
