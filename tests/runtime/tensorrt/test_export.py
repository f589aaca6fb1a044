"""The exported files: valid, named as they should be, and run by ONNX Runtime with torch's numbers."""

from pathlib import Path

import pytest
import torch

from tests.runtime.models import (
    CHAIN,
    TREE,
    Run,
    engine_config,
    greedy,
    greedy_params,
    prepare_model,
    random_model,
    random_prompts,
)
from tests.runtime.tensorrt.engine_world import engine_on
from tests.runtime.tensorrt.exported import exported_pair
from tests.runtime.tensorrt.stage_parity import Both, kv_after_compaction, largest_differences
from wingbeat.runtime.tensorrt.base_graph import check_exportable, graph_attention
from wingbeat.runtime.tensorrt.engine_drafter import open_drafter
from wingbeat.runtime.tensorrt.onnx_session import OnnxSession
from wingbeat.runtime.verifier.loaded_model import UnsupportedModelError

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


def parity(pair, batch):
    config = pair.directory.base
    session = OnnxSession(pair.directory.graph("eagle_base", ".onnx"))
    return largest_differences(Both(pair.loaded(), session, config), batch)


def operators(file: Path) -> set[str]:
    return {node.op_type for node in onnx.load(file, load_external_data=False).graph.node}


@pytest.mark.slow
def test_the_graph_has_the_operators_and_names_that_builders_know(pair):
    file = pair.directory.graph("eagle_base", ".onnx")
    model = onnx.load(file, load_external_data=False)
    assert operators(file) >= {"TensorScatter", "RotaryEmbedding", "RMSNormalization"}
    inputs = [part.name for part in model.graph.input]
    expected = ["input_ids", "attention_pos_id", "kvcache_start_index", "last_token_ids", "attention_mask"]
    assert inputs == [*expected, "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    assert [part.name for part in model.graph.output][:3] == ["logits", "hidden_states", "present_k_cache_0"]
    names = {weight.name for weight in model.graph.initializer}
    assert {"model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"} <= names
    assert {weight.external_data[0].value for weight in model.graph.initializer if weight.external_data} == {
        "eagle_base.onnx.data"
    }


@pytest.mark.slow
def test_onnx_runtime_gives_what_torch_gives_in_every_stage(pair):
    differences = parity(pair, 4)
    assert max(differences.values()) <= TOLERANCE, differences


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
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", ["tree", "chain", "plain"])
def test_text_by_onnx_runtime_is_that_of_generate(pair, shape, batch):
    model = prepare_model(random_model("llama", num_hidden_layers=2), "llama").model
    prompts = random_prompts((5, 17, 40, 3, 64, 9, 33, 21))
    expected, _ = greedy(model, prompts, 64)
    speculation = CHAIN if shape == "chain" else TREE
    limits = engine_config(speculation, max_num_seqs=batch, num_kv_blocks=None)
    drafter = None
    if shape != "plain":
        drafter = open_drafter(pair.directory.folder, pair.head, pair.model, speculation, torch.device("cpu"))
    session = OnnxSession(pair.directory.graph("eagle_base", ".onnx"))
    engine = engine_on(session, pair.directory.base, limits, drafter)
    assert Run(engine, prompts, greedy_params(64)).finish() == expected


def test_a_mixture_of_experts_is_refused_by_name():
    loaded = prepare_model(random_model("qwen3_moe", num_hidden_layers=1), "qwen3_moe")
    with pytest.raises(UnsupportedModelError, match="qwen3_moe is a mixture of experts"):
        check_exportable(loaded)


def test_attention_sinks_are_refused():
    with pytest.raises(UnsupportedModelError, match="attention sinks"):
        graph_attention(None, torch.zeros(0), torch.zeros(0), torch.zeros(0), None, s_aux=torch.zeros(4))
