"""A sample of `benchmarks/architectures.py`: what is served writes the text of transformers, the rest is refused."""

import importlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.few(3)

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

SERVED = (
    *("llama", "mistral", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "phi3", "gpt_oss", "gpt2", "deepseek_v3"),
    # whose attention output must be contiguous
    *("afmoe", "jetmoe"),
    # whose windows are in their masks only
    *("phimoe", "qwen2_moe"),
    # whose layers keep recurrent or convolution state
    *("falcon_h1", "jamba", "lfm2_moe", "qwen3_5_moe_text"),
    # whose configuration names no end of text
    "roc_bert",
)
FLIPPED = ("gpt_oss", "minimax_m2")
"""Mixtures that the trial refuses in bfloat16 with random weights; published weights are not tried here."""
REFUSED = {
    "zamba": "attention modules have no layer_idx",
    "mamba": "recurrent state",
    "diffllama": "layer 0 calls attention 2 times",
    "bart": "takes no position_ids",
    "whisper": "takes no position_ids",
    "bloom": "ALiBi",
    "doge": "a mask that the model makes by itself",
    "deepseek_v4": "keys where 9 tokens are",
    "nemotron": "do not pass the keywords of its forward on",
}


@pytest.fixture(scope="module")
def architectures():
    """The benchmark's module, with shorter texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        module = importlib.import_module("architectures")
        patch.setattr(module, "PROMPT_LENS", (20, 5))
        patch.setattr(module, "NUM_TOKENS", 8)
        yield module


@pytest.mark.few(2)
@pytest.mark.parametrize("model_type", SERVED)
def test_served_with_the_text_of_transformers(architectures, model_type):
    outcome = architectures.try_architecture(model_type)
    assert outcome.outcome == "equal", outcome.reason


def measured() -> list[str]:
    """Model types that the committed results of the benchmark call equal."""
    outcomes = json.loads((BENCHMARKS / "results" / "architectures.json").read_text(encoding="utf-8"))["outcomes"]
    return [one["model_type"] for one in outcomes if one["outcome"] == "equal"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", measured())
def test_every_family_of_the_results_is_served(architectures, model_type):
    outcome = architectures.try_architecture(model_type)
    assert outcome.outcome == "equal", outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in measured() if name not in FLIPPED])
def test_every_family_is_loaded_in_half_precision(architectures, model_type):
    """The trial at load compares the model with its own arithmetic in float32."""
    architectures.prepare_model(architectures.tiny_model(model_type).bfloat16(), model_type)


@pytest.mark.parametrize("model_type", list(REFUSED))
def test_refused_for_what_it_is(architectures, model_type):
    outcome = architectures.try_architecture(model_type)
    assert outcome.outcome == "refused", outcome.reason
    assert REFUSED[model_type] in outcome.reason
