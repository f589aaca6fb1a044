"""The exported files: valid, named as they should be, and run by ONNX Runtime with torch's numbers."""

from pathlib import Path

import pytest
import torch

from tests.runtime.hybrids import hybrid, needs_states
from tests.runtime.models import (
    CHAIN,
    PROMPT_LENS,
    TREE,
    Run,
    engine_config,
    generate,
    greedy,
    greedy_params,
    new_engine,
    prepare_model,
    random_head,
    random_model,
    random_prompts,
    reference,
)
from tests.runtime.tensorrt import draft_parity
from tests.runtime.tensorrt.draft_parity import draft_differences, head_of
from tests.runtime.tensorrt.engine_world import LIMITS, draft_config, engine_on
from tests.runtime.tensorrt.exported import demo_head, exported_demo, exported_pair
from tests.runtime.tensorrt.stage_parity import Both, kv_after_compaction, largest_differences
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.one_pass.one_pass_drafter import build_one_pass
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.tensorrt.base_graph import check_exportable, graph_attention
from wingbeat.runtime.tensorrt.export import export_draft
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.onnx_session import OnnxSession
from wingbeat.runtime.tensorrt.open_drafter import open_drafter
from wingbeat.runtime.verifier_errors import UnsupportedModelError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

TOLERANCE = 2e-5
SMALL = {"initializer_range": 0.1, "num_hidden_layers": 4}
VERIFIERS = {
    "llama": SMALL,
    "llama-tied": SMALL | {"tie_word_embeddings": True},
    "qwen3": SMALL,
    "mistral": SMALL,
    "gemma2": SMALL,
    "gemma3": SMALL,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The smallest pair that has every kind of node."""
    return exported_pair(tmp_path_factory.mktemp("pair"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return exported_demo(tmp_path_factory.mktemp("demo"))


def parity(pair, batch, relative=False):
    config = pair.directory.base
    session = OnnxSession(pair.directory.graph("eagle_base", ".onnx"))
    return largest_differences(Both(pair.loaded(), session, config), batch, relative)


def operators(file: Path) -> set[str]:
    return {node.op_type for node in onnx.load(file, load_external_data=False).graph.node}


@pytest.mark.slow
def test_the_graph_has_the_operators_and_names_that_builders_know(pair):
    file = pair.directory.graph("eagle_base", ".onnx")
    model = onnx.load(file, load_external_data=False)
    assert operators(file) >= {"TensorScatter", "RotaryEmbedding", "RMSNormalization"}
    # No builder takes the operator in float32.
    assert "Attention" not in operators(file)
    inputs = [part.name for part in model.graph.input]
    expected = ["input_ids", "attention_pos_id", "kvcache_start_index", "last_token_ids", "attention_mask"]
    assert inputs == [*expected, "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    shapes = {part.name: [dim.dim_param for dim in part.type.tensor_type.shape.dim] for part in model.graph.input}
    assert shapes["attention_pos_id"] == ["batch", "rows"]
    assert (shapes["last_token_ids"], shapes["v_cache_1"][0]) == (["batch", "selected"], "batch")
    assert [part.name for part in model.graph.output][:3] == ["logits", "hidden_states", "present_k_cache_0"]
    assert {weight.external_data[0].value for weight in model.graph.initializer if weight.external_data} == {
        "eagle_base.onnx.data"
    }


@pytest.mark.slow
def test_linear_weights_have_the_names_that_adapters_know(pair):
    for graph, module in (("eagle_base", pair.loaded().model), ("eagle_draft", random_head(pair.loaded()))):
        file = pair.directory.graph(graph, ".onnx")
        found = {weight.name for weight in onnx.load(file, load_external_data=False).graph.initializer}
        linear = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
        assert linear - found == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
def test_verifiers_of_many_kinds_have_torchs_numbers(name, tmp_path):
    exported = exported_pair(tmp_path, name.partition("-")[0], **VERIFIERS[name])
    for batch in (1, 4):
        differences = parity(exported, batch)
        assert max(differences.values()) <= TOLERANCE, differences
    session = OnnxSession(exported.directory.graph("eagle_base", ".onnx"))
    before, after = kv_after_compaction(Both(exported.loaded(), session, exported.directory.base), 4)
    assert before > 100 * TOLERANCE
    assert after <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(("opset", "without"), [(23, {"TensorScatter"}), (18, {"TensorScatter", "RMSNormalization"})])
def test_older_opsets_say_the_same_in_smaller_operators(opset, without, tmp_path):
    exported = exported_pair(tmp_path, opset=opset, **SMALL)
    assert not operators(exported.directory.graph("eagle_base", ".onnx")) & without
    differences = parity(exported, 4)
    assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_uses_the_attention_operator(dtype, tmp_path):
    exported = exported_pair(tmp_path, dtype=dtype, num_hidden_layers=2)
    for name in ("eagle_base", "eagle_draft"):
        assert "Attention" in operators(exported.directory.graph(name, ".onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "eagle3.1", "partial", "deep", "latent", "demo"])
def test_heads_of_every_kind_have_torchs_numbers_in_every_step(kind, tmp_path):
    head, file = demo_head(torch.float32) if kind == "demo" else head_of(kind, std=0.1), tmp_path / "eagle_draft.onnx"
    export_draft(head, LIMITS, GraphOps(24, torch.float32), file)
    for batch in (1, 4):
        differences = draft_differences(OnnxSession(file), draft_config(head), head, batch, relative=kind == "demo")
        assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grids", "latent-grids", "eagle1"])
def test_heads_that_see_images_have_torchs_numbers_in_every_step(kind, tmp_path):
    head, file = head_of(kind, std=0.1), tmp_path / "eagle_draft.onnx"
    config = draft_config(head, draft_parity.GRIDS)
    export_draft(head, LIMITS, GraphOps(24, torch.float32), file, config.media)
    session = OnnxSession(file)
    assert {"multimodal_rows", "multimodal_embeddings"} <= session.inputs.keys()
    for batch in (1, 4):
        differences = draft_differences(session, config, head, batch)
        assert max(differences.values()) <= TOLERANCE, differences


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_the_demo_verifier_has_torchs_numbers_in_every_stage(demo, batch):
    # Its hidden states are around 20 and reach 120: 2e-5 is under three units in the last place of a float32 there.
    differences = parity(demo, batch, relative=True)
    assert max(differences.values()) <= TOLERANCE, differences


def engine_by_onnx_runtime(pair, speculation, batch, with_drafter=True, **fields):
    """An engine on a directory's ONNX files."""
    folder, cpu = pair.directory.folder, torch.device("cpu")
    drafter = open_drafter(folder, pair.head, pair.model, speculation, cpu) if with_drafter else None
    limits = engine_config(speculation, max_num_seqs=batch, num_kv_blocks=None, **fields)
    return engine_on(pair.directory.open_session("eagle_base", cpu), pair.directory.base, limits, drafter)


@pytest.fixture(scope="module")
def written(pair):
    """Prompts, and what transformers' generate() writes behind them."""
    prompts = random_prompts(PROMPT_LENS, seed=2)
    return prompts, greedy(pair.loaded().model, prompts, 64)[0]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", ["tree", "chain", "plain"])
def test_text_by_onnx_runtime_is_that_of_generate(pair, written, shape, batch):
    prompts, expected = written
    engine = engine_by_onnx_runtime(pair, CHAIN if shape == "chain" else TREE, batch, shape != "plain")
    assert Run(engine, prompts, greedy_params(64)).finish() == expected


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
def test_the_demo_pairs_text_is_that_of_generate_and_drafts_are_accepted(demo, batch):
    expected = reference("demo")
    engine = engine_by_onnx_runtime(demo, TREE, batch)
    texts = Run(engine, expected.prompts, greedy_params(64)).finish()
    assert texts == [more[:64] for more in expected.continuations]
    assert engine.speculation.num_accepted_tokens > engine.speculation.num_drafts


@pytest.mark.slow
def test_the_demos_one_pass_head_drafts_by_onnx_runtime_what_it_drafts_by_torch(tmp_path):
    expected, counts = reference("demo"), []
    pair = exported_demo(tmp_path, "dflash2")
    speculation = SpeculationConfig(draft_steps=5, draft_top_k=2, verify_tree_size=12)
    target = TargetDescription.from_checkpoint(pair.model)
    for by_engine in (True, False):
        if by_engine:
            engine = engine_by_onnx_runtime(pair, speculation, 4)
        else:
            drafter = build_one_pass(str(pair.head), target, speculation, DrafterOptions())
            engine = new_engine(expected.loaded, engine_config(speculation, max_num_seqs=4), drafter)
        texts = Run(engine, expected.prompts, greedy_params(64)).finish()
        assert texts == [more[:64] for more in expected.continuations]
        counts.append((engine.speculation.num_drafts, engine.speculation.num_accepted_tokens))
        engine.model.remove_taps()
    assert counts[0] == counts[1]
    assert counts[0][1] > counts[0][0]


@pytest.mark.slow
def test_sampled_text_by_onnx_runtime_is_that_of_the_torch_backend(demo):
    expected = reference("demo")
    prompts = expected.prompts[:4]
    params = [SamplingParams(max_tokens=32, temperature=0.8, seed=7 + row, ignore_eos=True) for row in range(4)]
    ours = Run(engine_by_onnx_runtime(demo, TREE, 4), prompts, params).finish()
    theirs, _ = generate(expected.loaded, engine_config(TREE), None, prompts, params)
    assert ours == theirs


def test_a_mixture_of_experts_is_refused_by_name():
    loaded = prepare_model(random_model("qwen3_moe", num_hidden_layers=1), "qwen3_moe")
    with pytest.raises(UnsupportedModelError, match="qwen3_moe is a mixture of experts"):
        check_exportable(loaded)


@needs_states
def test_layers_with_states_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="lfm2 has recurrent states"):
        check_exportable(hybrid("lfm2").loaded)


def test_attention_sinks_are_refused():
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        graph_attention(None, torch.zeros(0), torch.zeros(0), torch.zeros(0), None, s_aux=torch.zeros(4))
