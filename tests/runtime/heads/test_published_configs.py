"""Configs of published heads are read with the right meaning, or refused by name."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from wingbeat.runtime.heads.eagle1 import Eagle1HeadConfig
from wingbeat.runtime.heads.eagle3 import EagleHeadConfig
from wingbeat.runtime.heads.head_config import conventions, head_config
from wingbeat.runtime.heads.layouts import recognise

LLAMA3_SCALING = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3_SCALING |= {"original_max_position_embeddings": 4096}

YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707}
YARN |= {"mscale_all_dim": 0.707, "original_max_position_embeddings": 4096}


@dataclass(frozen=True)
class Published:
    """A head's config as far as it matters, the shape of its verifier, and the expected reading."""

    architecture: str
    sizes: tuple[int, int, int, int, int]
    """hidden, intermediate, heads, key-value heads, positions"""
    vocab: int
    num_layers: int
    taps: tuple[int, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    layout: str = "SpecForge"
    head_dim: int = 128
    theta: float = 10000.0
    trained_theta: float | None = None
    """RoPE base to try first, where the trainer ignored the config's base."""
    rope_type: str = "default"
    draft_vocab: int = 32000
    readings: int = 1

    @property
    def raw(self) -> dict[str, Any]:
        """Fields of config.json."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        names += ("max_position_embeddings",)
        sizes = dict(zip(names, self.sizes, strict=True))
        common = {"model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
        return {"architectures": [self.architecture], "vocab_size": self.vocab, **common, **sizes, **self.fields}


def draft(**fields):
    return {"draft_vocab_size": 32000, **fields}


def outputs(*ids, **fields):
    return draft(eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}, **fields)


SPECFORGE, ANGELSLIM, SAFEAILAB = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM"
QWEN = {"head_dim": 128, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False, "sliding_window": None}
MILLION = 1e6
EAGLE3 = {
    "llama-3.1-8b, SafeAILab": Published(
        SAFEAILAB, (4096, 14336, 32, 8, 2048), 128256, 32, (2, 16, 29), draft(), "SafeAILab", readings=3
    ),
    "llama-3.1-8b, SpecForge": Published(
        SPECFORGE, (4096, 14336, 32, 8, 2048), 128256, 32, (2, 16, 29), draft(), readings=3
    ),
    "llama-3.3-70b": Published(
        SPECFORGE,
        (8192, 28672, 64, 8, 4096),
        128256,
        80,
        (2, 40, 77),
        draft(head_dim=128, rope_scaling=LLAMA3_SCALING, rope_theta=500000.0),
        theta=500000.0,
        rope_type="llama3",
        readings=3,
    ),
    "qwen3-1.7b": Published(
        ANGELSLIM,
        (2048, 6144, 16, 8, 40960),
        151936,
        28,
        (2, 14, 25),
        draft(**QWEN),
        "AngelSlim",
        theta=MILLION,
        trained_theta=10000.0,
        readings=6,
    ),
    "qwen3-4b": Published(
        SPECFORGE, (2560, 9728, 32, 8, 40960), 151936, 36, (2, 18, 33), draft(**QWEN), theta=MILLION, readings=6
    ),
    "qwen3-8b": Published(
        SPECFORGE, (4096, 12288, 32, 8, 40960), 151936, 36, (2, 18, 33), draft(**QWEN), theta=MILLION, readings=6
    ),
    "qwen3-14b": Published(
        ANGELSLIM,
        (5120, 17408, 40, 8, 40960),
        151936,
        40,
        (2, 20, 37),
        draft(**QWEN),
        "AngelSlim",
        theta=MILLION,
        trained_theta=10000.0,
        readings=6,
    ),
    "qwen3-32b": Published(
        SPECFORGE, (5120, 25600, 64, 8, 40960), 151936, 64, (2, 32, 61), draft(**QWEN), theta=MILLION, readings=6
    ),
    "qwen3-30b-a3b": Published(
        SPECFORGE, (2048, 12288, 32, 4, 2048), 151936, 48, (2, 24, 45), draft(**QWEN), theta=MILLION, readings=6
    ),
    "qwen3-30b-a3b, EAGLE-3.1": Published(
        SPECFORGE,
        (2048, 12288, 32, 4, 2048),
        151936,
        48,
        (2, 24, 45),
        draft(fc_norm=True, norm_output=True, **QWEN),
        theta=MILLION,
        readings=6,
    ),
    "qwen3-235b-a22b": Published(
        SPECFORGE,
        (4096, 24576, 64, 4, 40960),
        151936,
        94,
        (2, 47, 91),
        outputs(1, 46, 90, **QWEN),
        theta=MILLION,
        readings=2,
    ),
    "gpt-oss-20b": Published(
        SPECFORGE,
        (2880, 17280, 64, 8, 4096),
        201088,
        24,
        (2, 12, 22),
        outputs(1, 11, 21, head_dim=64),
        head_dim=64,
        readings=2,
    ),
    "gpt-oss-120b": Published(
        SPECFORGE,
        (2880, 17280, 64, 8, 4096),
        201088,
        36,
        (2, 18, 34),
        outputs(1, 17, 33, head_dim=64),
        head_dim=64,
        readings=2,
    ),
    "llama-4-scout": Published(SPECFORGE, (5120, 32768, 40, 8, 2048), 202048, 48, (2, 24, 45), draft(), readings=3),
    "deepseek-v3": Published(SPECFORGE, (7168, 40960, 56, 8, 163840), 129280, 61, (2, 30, 58), outputs(1, 29, 57)),
    "deepseek-v2-lite": Published(
        SPECFORGE,
        (2048, 10944, 16, 16, 163840),
        102400,
        27,
        (2, 13, 24),
        draft(head_dim=128, rope_theta=10000, rope_scaling=YARN),
        rope_type="yarn",
        readings=3,
    ),
    "qwen2.5-vl-7b": Published(
        SPECFORGE,
        (3584, 18944, 28, 4, 8192),
        152064,
        28,
        (2, 14, 25),
        draft(head_dim=128, rope_theta=1000000, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]}),
        theta=MILLION,
        readings=3,
    ),
    "qwen3-vl-4b": Published(
        ANGELSLIM,
        (2560, 9728, 32, 8, 262144),
        151936,
        36,
        (2, 18, 33),
        draft(
            head_dim=128,
            rope_theta=5000000,
            rope_scaling={"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
        ),
        "AngelSlim",
        theta=5e6,
        readings=3,
    ),
}


@pytest.mark.parametrize("name", EAGLE3)
def test_a_published_eagle3_config_parses(name):
    published = EAGLE3[name]
    raw, hidden = published.raw, published.sizes[0]
    shapes = {"midlayer.hidden_norm.weight": (hidden,), "fc.weight": (hidden, 3 * hidden)}
    layout = recognise(raw, shapes)
    readings = conventions(raw, layout, shapes, published.num_layers, hidden)
    assert (layout.name, len(readings)) == (published.layout, published.readings)
    assert readings[0].rope_theta == published.trained_theta
    config = head_config(raw, layout, shapes, hidden, readings[0])
    assert isinstance(config, EagleHeadConfig)
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_key_value_heads)
    assert (*sizes, config.max_position_embeddings) == published.sizes
    assert (config.vocab_size, config.draft_vocab_size) == (published.vocab, published.draft_vocab)
    assert (config.head_dim, config.tap_layers) == (published.head_dim, published.taps)
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["rope_theta"]) == (published.rope_type, published.theta)
    assert not {"mrope_section", "mrope_interleaved", "type"} & set(rope)
    scaling = raw.get("rope_scaling") or {}
    stated = (tuple(scaling.get("mrope_section", ())), scaling.get("mrope_interleaved", False))
    assert (config.mrope_section, config.mrope_interleaved) == stated
    assert config.fc_norm == config.norm_output == bool(raw.get("fc_norm"))
    assert not any((config.attention_bias, config.output_bias, config.qk_norm, config.norm_before_residual))


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "vocab", "num_layers", "fields", "positions"),
    [
        (4096, 32, 32, 32000, 32, {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6}, 4096),
        (8192, 64, 8, 32000, 80, {"num_key_value_heads": 8, "max_position_embeddings": 4096}, 4096),
        (6656, 52, 13, 32000, 60, {"num_key_value_heads": 13, "max_sequence_length": 2048}, 2048),
        (4096, 32, 8, 128256, 32, {"num_key_value_heads": 8, "rope_theta": 500000.0, "bias": False}, 2048),
    ],
    ids=["vicuna-7b", "llama-2-70b", "vicuna-33b", "llama-3-8b"],
)
def test_a_published_eagle1_config_parses(hidden, heads, kv_heads, vocab, num_layers, fields, positions):
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": 11008,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        **fields,
    }
    shapes = {"layers.0.self_attn.q_proj.weight": (hidden, hidden), "fc.weight": (hidden, 2 * hidden)}
    layout = recognise(raw, shapes)
    (reading,) = conventions(raw, layout, shapes, num_layers, hidden)
    config = head_config(raw, layout, shapes, hidden, reading)
    assert isinstance(config, Eagle1HeadConfig)
    assert (config.tap_layers, config.num_key_value_heads) == ((num_layers,), kv_heads)
    assert (config.draft_vocab_size, config.max_position_embeddings) == (vocab, positions)
    assert config.rope_parameters["rope_theta"] == fields.get("rope_theta", 10000.0)
