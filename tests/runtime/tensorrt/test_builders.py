"""TensorRT-RTX takes the graphs of every stage, on a machine without a GPU; a missing builder is one line."""

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from tests.needs import needs
from tests.runtime.tensorrt.draft_parity import latent_config
from tests.runtime.tensorrt.exported import demo_head
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.kv.pool import LayerAttention
from wingbeat.runtime.one_pass.config import LatticeConfig, LayerMask, OnePassConfig, Slots
from wingbeat.runtime.one_pass.families import OnePassFamily
from wingbeat.runtime.one_pass.head import OnePassHead
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tensorrt import builders
from wingbeat.runtime.tensorrt.builders import BuildError, find_builder
from wingbeat.runtime.tensorrt.engine_config import DraftMedia, Limits
from wingbeat.runtime.tensorrt.export import export_base, export_draft
from wingbeat.runtime.tensorrt.graph_ops import GraphOps
from wingbeat.runtime.tensorrt.graph_shapes import base_profiles, draft_profiles, input_shapes
from wingbeat.runtime.tensorrt.session import EngineStage
from wingbeat.runtime.verifier.layers.attention import ATTENTION_NAME
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel, decoder_layers

LIMITS = Limits(
    max_batch_size=4, max_input_len=512, max_kv_cache_capacity=1984, max_verify_tree_size=64, max_draft_tree_size=64
)
CAPABILITIES = ("8.0", "8.9", "12.0")
SHAPES = {
    "demo": {
        **{"hidden_size": 160, "intermediate_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1},
        **{"head_dim": 32, "vocab_size": 4096, "num_hidden_layers": 3},
    },
    "llama-3.1-8b": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"head_dim": 128, "vocab_size": 8192, "num_hidden_layers": 1},
    },
}


@pytest.fixture(scope="module")
def builder():
    try:
        return find_builder("tensorrt-rtx")
    except BuildError as error:
        pytest.skip(str(error))


def of_shape(name: str, dtype: torch.dtype) -> LoadedModel:
    """A verifier of these shapes whose weights nobody reads: neither probed nor tried."""
    config = LlamaConfig(**SHAPES[name], max_position_embeddings=2048, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cpu").eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    model.model.rotary_emb = type(rotary)(config)
    assert ATTENTION_NAME in AttentionInterface()
    model.set_attn_implementation(ATTENTION_NAME)
    dim = config.head_dim
    layers = [LayerAttention(config.num_attention_heads, config.num_key_value_heads, dim, dim, None)]
    layers *= config.num_hidden_layers
    names = ("hidden_size", "vocab_size", "max_position_embeddings")
    sizes = {one: getattr(config, one) for one in names}
    return LoadedModel(model, name, layers, decoder_layers(model, len(layers)), **sizes, eos_token_ids=frozenset())


@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "max_loras"),
    [
        ("demo", torch.float16, 0),
        ("llama-3.1-8b", torch.float16, 0),
        ("llama-3.1-8b", torch.bfloat16, 0),
        pytest.param("llama-3.1-8b", torch.bfloat16, 4, marks=needs("lora")),
    ],
    ids=["demo-float16", "llama-8b-float16", "llama-8b-bfloat16", "llama-8b-bfloat16-adapters"],
)
def test_the_builder_takes_the_verifiers_stages_for_three_gpus(builder, name, dtype, max_loras, tmp_path):
    loaded, file = of_shape(name, dtype), tmp_path / "eagle_base.onnx"
    taps = tuple(range(len(loaded.layers)))
    room = first_result("graph_room", loaded, LIMITS.model_copy(update={"max_loras": max_loras} if max_loras else {}))
    assert room is None if max_loras == 0 else len(room.specs(dtype)) == 1 + 2 * 7
    export_base(loaded, taps, LIMITS, GraphOps(24, dtype), file, room)
    for capability in CAPABILITIES:
        engine = tmp_path / f"{capability}.engine"
        builder.build(file, base_profiles(LIMITS), engine, (capability,), tmp_path / "timing.cache")
        assert engine.stat().st_size > 0
    assert (tmp_path / "timing.cache").stat().st_size > 0


@pytest.mark.tensorrt
@pytest.mark.slow
def test_the_builder_takes_the_demo_heads_stages_for_three_gpus(builder, tmp_path):
    head = demo_head(torch.float16)
    file = tmp_path / "eagle_draft.onnx"
    export_draft(head, LIMITS, GraphOps(24, torch.float16), file)
    for capability in CAPABILITIES:
        engine = tmp_path / f"{capability}.engine"
        builder.build(file, draft_profiles(LIMITS), engine, (capability,))
        assert engine.stat().st_size > 0


HEAD = {
    **{"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8},
    **{"target_hidden_size": 512, "vocab_size": 4096, "draft_vocab_size": 1024, "tap_layers": (1, 2, 3)},
}
BLOCK = {name: size for name, size in HEAD.items() if name != "tap_layers"} | {
    **{"family": OnePassFamily.DFLASH2, "slots": Slots.FILL_IN, "block_size": 8, "mask_token_id": 5, "head_dim": 64},
    **{"tap_layers": (1, 2, 3), "masks": (LayerMask(causal=True, window=128), LayerMask(causal=False))},
    "lattice": LatticeConfig(num_taps=2, group_size=64, rank=8, top_k=8),
}
HEADS = {
    "one-pass": lambda: OnePassHead(OnePassConfig(**BLOCK)),
    "three-layers": lambda: EagleHead(EagleHeadConfig(**HEAD, head_dim=64, num_layers=3, rotary_dim=32, qk_norm=True)),
    "latent": lambda: latent_config(
        **HEAD, head_dim=192, query_rank=256, kv_rank=256, rope_dim=64, value_dim=128
    ).new_head(),
}


@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_the_builder_takes_heads_of_other_shapes_for_three_gpus(builder, kind, tmp_path):
    head, file = HEADS[kind]().to(torch.float16).eval().requires_grad_(False), tmp_path / "eagle_draft.onnx"
    export_draft(head, LIMITS, GraphOps(24, torch.float16), file)
    for capability in CAPABILITIES:
        builder.build(file, draft_profiles(LIMITS), tmp_path / f"{capability}.engine", (capability,))
        assert (tmp_path / f"{capability}.engine").stat().st_size > 0


@pytest.mark.tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("num_axes", [3, 0])
def test_the_builder_takes_heads_that_see_images_for_three_gpus(builder, num_axes, tmp_path):
    sections = {"mrope_section": (12, 10, 10), "mrope_interleaved": True} if num_axes else {}
    head = EagleHead(EagleHeadConfig(**HEAD, head_dim=64, **sections)).to(torch.float16).eval().requires_grad_(False)
    file = tmp_path / "eagle_draft.onnx"
    export_draft(head, LIMITS, GraphOps(24, torch.float16), file, DraftMedia(num_axes, 512))
    for capability in CAPABILITIES:
        builder.build(file, draft_profiles(LIMITS), tmp_path / f"{capability}.engine", (capability,))
        assert (tmp_path / f"{capability}.engine").stat().st_size > 0


@pytest.mark.tensorrt
def test_a_gpu_that_the_builder_does_not_know_is_named(builder, tmp_path):
    import onnx

    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    other = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Neg", ["x"], ["y"])], "neg", [value], [other])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), tmp_path / "neg.onnx")
    with pytest.raises(BuildError, match=r"compute_capability 1\.0: tensorrt-rtx .* builds for SM"):
        builder.build(tmp_path / "neg.onnx", {}, tmp_path / "neg.engine", ("1.0",))


@pytest.mark.parametrize("name", ["auto", "tensorrt", "tensorrt-rtx"])
def test_a_missing_builder_is_one_line_that_says_what_to_install(monkeypatch, name):
    monkeypatch.setattr(builders, "_tensorrt", lambda: None)
    monkeypatch.setattr(builders, "_tensorrt_rtx", lambda: None)
    with pytest.raises(BuildError, match=r"pip install 'wingbeat\[tensorrt\]'.*--onnx-only") as raised:
        find_builder(name)
    assert "\n" not in str(raised.value)


def test_tensorrt_is_preferred(monkeypatch):
    found = builders.EngineBuilder("tensorrt", None, "11.4")
    monkeypatch.setattr(builders, "_tensorrt", lambda: found)
    monkeypatch.setattr(builders, "_tensorrt_rtx", lambda: found._replace(name="tensorrt-rtx"))
    assert find_builder() is found
    assert find_builder("tensorrt-rtx").name == "tensorrt-rtx"


def test_every_stage_has_a_profile_of_its_own_shapes():
    profiles = base_profiles(LIMITS)
    assert list(profiles) == [EngineStage.PREFILL, EngineStage.VERIFY, EngineStage.PLAIN]
    shapes = {"input_ids": ("batch", "rows"), "k_cache_0": ("batch", 8, 2048, 128)}
    assert input_shapes(profiles[EngineStage.PREFILL], shapes)["input_ids"] == ((1, 1), (4, 512), (4, 512))
    assert input_shapes(profiles[EngineStage.PLAIN], shapes)["input_ids"] == ((1, 1), (4, 1), (4, 1))
    assert input_shapes(profiles[EngineStage.VERIFY], shapes)["k_cache_0"][2] == (4, 8, 2048, 128)
    drafts = draft_profiles(LIMITS)
    assert list(drafts) == [EngineStage.PREFILL, EngineStage.PROPOSAL, EngineStage.ACCEPT]
    assert input_shapes(drafts[EngineStage.PROPOSAL], shapes)["input_ids"][2] == (4, 64)
