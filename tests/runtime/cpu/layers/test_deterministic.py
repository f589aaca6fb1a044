"""In deterministic mode requests get the same tokens in half precision, whatever shares their rounds."""

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.runtime.models import DEMO_PAIR, TREE, engine_config, generate, random_head, random_model, random_prompts
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from wingbeat.kernels.cpu.ops import cpu_kernels, use_kernels
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.cpu.layers.layer_stack import CpuLayer
from wingbeat.runtime.cpu.layers.packed_linears import InputMajorLinear
from wingbeat.runtime.drafters.choice import parse_drafter
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.pair import PairSettings, engine_of_pair
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import UnsupportedModelError

needs_compiler = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler")
DETERMINISTIC = {"deterministic": True}
LENGTH = 32
NUM_PROMPTS, MOST_PROMPTS = 8, 64
ALONE = SpeculationConfig(draft_steps=1, draft_top_k=1, verify_tree_size=2)
PLACES = [
    # (nodes of a tree, sequences at once); the rest of the grid is of the slow tier
    (1, 8),
    (16, 8),
    *(pytest.param(tree, batch, marks=pytest.mark.slow) for tree in (1, 2, 10, 64) for batch in (1, 16, 64)),
]


@cache
def loaded_in(dtype: torch.dtype, name: str = "llama"):
    # Weights of this size make tokens about equally likely, so that the last bits of a logit decide.
    model = random_model(name, initializer_range=0.1).to(dtype)
    return prepare_model(model, name, deterministic=True)


def prompts_of(count: int) -> list[list[int]]:
    """Return random prompts; every third one begins like the first, so that prefix hits occur."""
    prompts = random_prompts(tuple(5 + 7 * (index % 9) for index in range(count)))
    return [random_prompts((40,), seed=2)[0] + own if index % 3 == 0 else own for index, own in enumerate(prompts)]


def params_of(count: int) -> list[SamplingParams]:
    """Return sampling parameters: every fourth request is greedy, every fourth has top-k and top-p."""
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "top_k": 50, "top_p": 0.9}, {"temperature": 1.0}, {}]
    return [SamplingParams(LENGTH, seed=seed, ignore_eos=True, **kinds[seed % 4]) for seed in range(count)]


@cache
def alone(dtype: torch.dtype, name: str, count: int) -> list[list[int]]:
    """Texts of the requests, each run by itself without drafts and with its whole prompt in one round."""
    config = engine_config(ALONE, max_num_seqs=1, max_num_batched_tokens=512, enable_prefix_caching=False)
    return generate(loaded_in(dtype, name), config, None, prompts_of(count), params_of(count))[0]


@pytest.mark.few(1)
@needs_compiler
@pytest.mark.parametrize(("num_nodes", "batch"), PLACES)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.bfloat16, "llama"),
        pytest.param(torch.float16, "llama", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "qwen3", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "mistral", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "gemma3", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_request_gets_the_tokens_that_it_gets_alone(dtype, name, num_nodes, batch):
    count = max(NUM_PROMPTS, min(batch + batch // 2, MOST_PROMPTS))
    expected, prompts, loaded = alone(dtype, name, count), prompts_of(count), loaded_in(dtype, name)
    drafter, speculation = None, ALONE
    if num_nodes > 1:
        chain = num_nodes == 2
        speculation = ALONE if chain else SpeculationConfig((num_nodes - 1) // 3, 3, num_nodes)
        sequences = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
        drafter = ScriptedDrafter(sequences, right_chain if chain else right_tree, loaded.vocab_size)
    config = engine_config(
        speculation,
        **DETERMINISTIC,
        max_num_seqs=batch,
        max_model_len=144,
        max_num_batched_tokens=24,
        # Only one of the longest sequences fits, so that sequences are preempted.
        num_kv_blocks=1 + max(13, 2 * batch),
    )
    tokens, engine = generate(loaded, config, drafter, prompts, params_of(count))
    assert tokens == expected
    assert batch != 8 or engine.stats().num_preemptions > 0
    assert num_nodes == 1 or engine.speculation.acceptance_length > 1.5


@needs_compiler
def test_a_drafter_of_weights_changes_no_token():
    dtype, name = torch.bfloat16, "llama"
    loaded = loaded_in(dtype, name)
    drafter = EagleDrafter(random_head(loaded).to(dtype), TREE)
    config = engine_config(TREE, **DETERMINISTIC)
    tokens, engine = generate(loaded, config, drafter, prompts_of(NUM_PROMPTS), params_of(NUM_PROMPTS))
    assert tokens == alone(dtype, name, NUM_PROMPTS)
    assert engine.speculation.num_drafts > 0


@pytest.mark.slow
@needs_compiler
def test_every_product_is_ours_and_logits_are_float32():
    loaded = loaded_in(torch.bfloat16)
    assert loaded.deterministic
    assert all(isinstance(layer, CpuLayer) for layer in loaded.decoder_layers)
    head = loaded.model.get_output_embeddings()
    assert isinstance(head, InputMajorLinear)
    with torch.inference_mode():
        assert head(torch.randn(3, loaded.hidden_size).bfloat16()).dtype == torch.float32


@needs_compiler
def test_models_of_other_layers_are_refused_by_name():
    said = r"deterministic is True, but its layers \(Qwen3MoeDecoderLayer\) do not run"
    with pytest.raises(UnsupportedModelError, match=said):
        prepare_model(random_model("qwen3_moe"), "qwen3_moe", deterministic=True)


@needs_compiler
def test_an_output_matrix_that_is_not_ours_is_refused_by_name():
    model = random_model("llama")
    model.lm_head.__class__ = type("Scaled", (torch.nn.Linear,), {})
    with pytest.raises(UnsupportedModelError, match=r"its lm_head \(Scaled\) does not run on wingbeat's kernels"):
        prepare_model(model, "llama", deterministic=True)


@needs_compiler
def test_rows_that_depend_on_others_are_found_at_the_start(monkeypatch):
    linear = cpu_kernels().packed_linear

    def by_count(x, panels, *, wide=False):
        out = linear(x, panels, wide=wide)
        return out if x.numel() == x.shape[-1] else out * (1 + 2**-23)

    monkeypatch.setattr(cpu_kernels(), "packed_linear", by_count)
    with pytest.raises(UnsupportedModelError, match="in a token tree are not, bit for bit, those of the same tokens"):
        prepare_model(random_model("llama"), "llama", deterministic=True)


def test_without_kernels_it_is_refused():
    before = use_kernels(False)
    try:
        with pytest.raises(UnsupportedModelError, match="there are no CPU kernels: a C\\+\\+ compiler is needed"):
            prepare_model(random_model("llama"), "llama", deterministic=True)
    finally:
        use_kernels(before)


def test_a_verifier_that_was_not_loaded_so_is_refused():
    loaded = prepare_model(random_model("llama"), "llama")
    with pytest.raises(ValueError, match="deterministic is True: the verifier was not loaded as deterministic"):
        generate(loaded, engine_config(**DETERMINISTIC), None, [], [])


def test_what_has_no_fixed_order_is_refused_before_weights_are_read():
    choice, limits = parse_drafter("none", DEMO_PAIR / "verifier"), engine_config(**DETERMINISTIC)
    settings = PairSettings(DEMO_PAIR / "verifier", choice, limits, torch.bfloat16, engine_dir=Path("/engine"))
    with pytest.raises(ValueError, match="deterministic is True and engine_dir is given: an engine's products"):
        engine_of_pair(settings, "cpu", lambda *_: None)


def test_limits_refuse_what_torch_would_compute():
    with pytest.raises(ValueError, match="deterministic is True and kv_cache_dtype is fp8"):
        EngineConfig(**DETERMINISTIC, kv_cache_dtype="fp8")
