"""Kernel launches on a fake GPU, counted by layer, by stage and by round.

As a program (`python -m tests.runtime.launch_counts`) it prints the table of `benchmarks/results/gpu_launches.md`.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from transformers import (
    AutoConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from tests.optional import kept
from tests.runtime.draft_world import taps_size
from tests.runtime.fake_gpu import CUDA, FakeGpu, fake_gpu, why_not
from tests.runtime.fake_gpu_graphs import FakeGraphDevice
from tests.runtime.gpu_world import (
    ALTERED,
    CHAIN,
    GREEDY,
    IDS,
    SAMPLED,
    SHAPE,
    TREE,
    engine_config,
    new_drafter,
    placed_verifier,
    serve,
    verifier,
)
from tests.runtime.hybrids import of_layers
from wingbeat.runtime.config import BENCHMARK_VARIABLE, EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.drafters.base import DraftBatch, DrafterNeeds
from wingbeat.runtime.drafters.prompt_stage import SIZES as PROMPT_SIZES
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.buckets import draft_batches
from wingbeat.runtime.graphs.graph_runner import Bucket, Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.protocol.messages import ChannelSpec
from wingbeat.runtime.round.choice import Choosing
from wingbeat.runtime.round.shapes import num_graphs
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

SHAPES = {"chain": CHAIN, "tree": TREE}
WHOLE_DRAFTS = {
    "a model of 16 layers": ("draft-model", 16),
    "a model of another vocabulary": ("foreign-vocabulary", 16),
    "two MTP modules": ("mtp", 1),
    "an assistant of four layers": ("shared_keys", 4),
}
"""Kinds whose drafts are counted whole, and layers of each."""
FULL = ["full_attention"] * 2
HYBRIDS = {
    "falcon_h1": (0,),
    "lfm2": (0, 1),
    "qwen3_5": (0, 1),
    "qwen3_next": (0, 1),
    "bamba": (0, 1),
    "nemotron_h": (0, 2),
    "jamba": (0, 1),
}
"""Indices of a recurrent layer and of an attention layer by hybrid; Falcon-H1's layers are both."""
SERVED = EngineConfig(
    max_num_seqs=256, speculation=SpeculationConfig(draft_steps=7, verify_tree_size=60, adaptive=True)
)
"""Configuration whose graphs are counted: large batches of wide trees."""

LIMITS: dict[str, int] = {
    "layer": 9,
    "layer by own products of few rows": 8,
    "layer of Gemma 3, with fused attention": 12,
    "layer of Gemma, with fused attention": 12,
    "layer of GLM-4, with fused attention": 11,
    "layer of Phi-3, with fused attention": 12,
    "layer of SmolLM3, with fused attention": 9,
    "layer of GLM-4-MoE, with fused attention and experts": 13,
    "layer of DeepSeek-V3, with fused attention and experts, attention over latents": 17,
    "layer of ERNIE-4.5-MoE, with fused attention and experts": 13,
    "layer of Hunyuan, with fused attention": 9,
    "layer of Llama 4, with fused attention and experts": 21,
    "layer of MiniMax-M2, with fused attention and experts": 14,
    "layer of Cohere 2, with fused attention": 12,
    "layer of Exaone 4, with fused attention": 10,
    "layer of OLMo 3, with fused attention": 11,
    "layer of OLMoE, with fused attention and experts": 14,
    "layer of gpt-oss, with fused attention and experts": 13,
    "layer of Qwen2-MoE, with fused attention and experts": 14,
    "layer of Qwen3-MoE, with fused attention and experts": 13,
    "layer of Phi, with fused attention": 10,
    "recurrent layer of falcon_h1": 16,
    "recurrent layer of falcon_h1 where tokens are chosen": 2,
    "recurrent layer of lfm2": 13,
    "recurrent layer of lfm2 where tokens are chosen": 1,
    "attention layer of lfm2": 11,
    "recurrent layer of qwen3_5": 15,
    "recurrent layer of qwen3_5 where tokens are chosen": 2,
    "attention layer of qwen3_5": 14,
    "recurrent layer of qwen3_next": 15,
    "recurrent layer of qwen3_next where tokens are chosen": 2,
    "attention layer of qwen3_next": 14,
    "recurrent layer of bamba": 12,
    "recurrent layer of bamba where tokens are chosen": 2,
    "attention layer of bamba": 11,
    "recurrent layer of nemotron_h": 7,
    "recurrent layer of nemotron_h where tokens are chosen": 2,
    "attention layer of nemotron_h": 6,
    "recurrent layer of jamba": 16,
    "recurrent layer of jamba where tokens are chosen": 2,
    "attention layer of jamba": 11,
    "decoding beside its layers, greedy": 9,
    "decoding beside its layers, sampled": 16,
    "decoding beside its layers, altered": 53,
    "verification of a chain beside its layers, greedy": 11,
    "verification of a tree beside its layers, greedy": 13,
    "verification of a tree beside its layers, sampled": 21,
    "verification of a tree beside its layers, altered": 59,
    "forced acceptance of a chain over its own, greedy": 0,
    "forced acceptance of a tree over its own, greedy": 0,
    "level of a chain": 12,
    "level of a tree": 12,
    "level of a chain by own products of few rows": 7,
    "level of a tree by own products of few rows": 7,
    "draft of one level, chain": 69,
    "draft of one level, tree": 60,
    "rules in a level of a chain": 6,
    "rules in a level of a tree": 6,
    "rules in a draft of one level, chain": 13,
    "rules in a draft of one level, tree": 13,
    "draft by a model of 16 layers, eager": 825,
    "draft by a model of 16 layers, captured": 5,
    "draft by a model of another vocabulary, eager": 835,
    "draft by a model of another vocabulary, captured": 5,
    "draft by two MTP modules, eager": 653,
    "draft by two MTP modules, captured": 3,
    "draft by an assistant of four layers, eager": 1426,
    "draft by an assistant of four layers, captured": 3,
    "beside the graphs of a round, plain": 1,
    "beside the graphs of a round, chain": 6,
    "beside the graphs of a round, tree": 6,
    "rules beside the graphs of a round, filtered": 1,
    "rules beside the graphs of a round, biased and penalized": 28,
    "a chain's round by the host, apart": 9,
    "a chain's round by the host, one graph": 2,
    "a chain's round in one graph over its graphs apart": 10,
    "a tree's round by the host, apart": 9,
    "a tree's round by the host, one graph": 2,
    "a tree's round in one graph over its graphs apart": 10,
    "a head's pass over three prompts, eager": 26,
    "a head's pass over three prompts, captured": 6,
    "layer of a mixed round": 10,
    "beside the graphs of a mixed round": 26,
    "eager mixed round beside its layers and its graph": 40,
    "another prompt chunk in a mixed round": 0,
    "layer of an eager round of prompts": 9,
    "eager round of prompts beside its layers": 33,
    "beside the graph of a round of prompts": 23,
    "another prompt in a round of prompts": 0,
    "graphs of a verifier": 65,
    "graphs of a verifier with max_loras": 94,
    "graphs of a drafter": 56,
    "graphs of a drafter for prompts": 4,
    "graphs of a drafter for rounds with rules": 49,
}
"""The most launches of each kind; what raises one says in its commit why. A context that is long enough to be split
among programs adds one launch a layer, which merges them."""


def counts(gpu: FakeGpu) -> dict[str, int]:
    """Every row of `LIMITS` as it is."""
    found: dict[str, int] = {}
    for name, shape in SHAPES.items():
        found |= _verifier_counts(gpu, name, shape)
    found |= _other_layers(gpu)
    found |= _hybrid_layers(gpu)
    for name, shape in SHAPES.items():
        found |= _drafter_counts(gpu, name, shape)
    found |= _whole_drafts(gpu)
    found |= _round_counts(gpu)
    found |= _one_graph_counts(gpu)
    found |= _prompts_of_drafters(gpu)
    found |= _mixed_counts(gpu)
    found |= _prompt_counts(gpu)
    found["graphs of a verifier"] = num_graphs(SERVED)
    for name in kept({"max_loras": 4}):
        found[f"graphs of a verifier with {name}"] = num_graphs(replace(SERVED, **{name: 4}))
    shape = SERVED.speculation
    batches = draft_batches(SERVED.max_num_seqs, shape.max_path, shape.draft_top_k)
    found["graphs of a drafter"] = len(batches) * shape.max_path
    found["graphs of a drafter for prompts"] = len(PROMPT_SIZES)
    found["graphs of a drafter for rounds with rules"] = len(batches) * (shape.max_path - 1)
    return {name: found[name] for name in kept(LIMITS)}


def _verifier_counts(gpu: FakeGpu, name: str, shape: SpeculationConfig) -> dict[str, int]:
    """Launches of a layer and of everything outside layers: the difference between models of one and two layers."""
    one, two = (captured(gpu, shape, verifier(num_layers)) for num_layers in (1, 2))
    per_layer = max(two[key] - one[key] for key in one)
    found = {"layer": per_layer}
    for (stage, choosing), total in one.items():
        what = "decoding" if stage == Stage.BASE_DECODING else f"verification of a {name}"
        found[f"{what} beside its layers, {choosing}"] = total - per_layer
    with patch.dict(os.environ, {BENCHMARK_VARIABLE: "1"}):
        forced = captured(gpu, shape, verifier(1), forced_acceptance=ForcedAcceptance.flat(0.8))
    key = (Stage.BASE_VERIFICATION, Choosing.GREEDY)
    return found | {f"forced acceptance of a {name} over its own, greedy": forced[key] - one[key]}


def _other_layers(gpu: FakeGpu) -> dict[str, int]:
    """Launches of layers whose products are ours, as they are where these are faster, and of layers that are not fused
    as a whole."""
    shape = SHAPE | IDS | {"tie_word_embeddings": False}

    def named(kind: str, **fields: Any) -> PreTrainedConfig:
        return AutoConfig.for_model(kind, **shape, **fields)

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    of_gpt_oss = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_theta": 1e4}}
    of_glm = experts | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
    made = {
        "Gemma 3": lambda count: Gemma3TextConfig(
            **shape, num_hidden_layers=count, layer_types=["full_attention"] * count
        ),
        "GLM-4": lambda count: Glm4Config(**shape, num_hidden_layers=count),
        "Phi-3": lambda count: Phi3Config(**shape, num_hidden_layers=count),
        "Gemma": lambda count: GemmaConfig(**shape, num_hidden_layers=count),
        "SmolLM3": lambda count: SmolLM3Config(**shape, num_hidden_layers=count),
        "OLMo 3": lambda count: named("olmo3", num_hidden_layers=count, layer_types=["full_attention"] * count),
        "Hunyuan": lambda count: named("hunyuan_v1_dense", num_hidden_layers=count),
        "Cohere 2": lambda count: named("cohere2", num_hidden_layers=count, layer_types=["full_attention"] * count),
        "Exaone 4": lambda count: named(
            "exaone4", num_hidden_layers=count, layer_types=["full_attention"] * count, sliding_window=None
        ),
    }
    local = {"num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_key_value_heads": SHAPE["num_attention_heads"], "head_dim": 16, "qk_rope_head_dim": 16}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    groups = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}
    mixtures = {
        "ERNIE-4.5-MoE": lambda count: named(
            "ernie4_5_moe",
            moe_num_experts=4,
            moe_k=2,
            moe_intermediate_size=32,
            moe_layer_start_index=0,
            num_hidden_layers=count,
        ),
        "Llama 4": lambda count: named(
            "llama4_text", num_local_experts=4, interleave_moe_layer_step=1, num_hidden_layers=count
        ),
        "MiniMax-M2": lambda count: named("minimax_m2", **local, num_hidden_layers=count),
        "OLMoE": lambda count: named("olmoe", **experts, num_hidden_layers=count),
        "GLM-4-MoE": lambda count: Glm4MoeConfig(**shape, **of_glm, n_routed_experts=4, num_hidden_layers=count),
        "gpt-oss": lambda count: GptOssConfig(
            **shape, num_hidden_layers=count, layer_types=["full_attention"] * count, **of_gpt_oss
        ),
        "Qwen2-MoE": lambda count: Qwen2MoeConfig(
            **shape, **experts, shared_expert_intermediate_size=64, num_hidden_layers=count
        ),
        "Qwen3-MoE": lambda count: Qwen3MoeConfig(**shape, **experts, num_hidden_layers=count),
    }
    own = [verifier(count) for count in (1, 2)]
    for loaded in own:
        for layer in loaded.decoder_layers:
            own_products(layer.products().values())
    one, two = (captured(gpu, CHAIN, loaded) for loaded in own)
    found = {"layer by own products of few rows": max(two[key] - one[key] for key in one)}
    rows = {f"layer of {name}, with fused attention": config for name, config in made.items()}
    mixed = {f"layer of {name}, with fused attention and experts": config for name, config in mixtures.items()}
    mixed["layer of DeepSeek-V3, with fused attention and experts, attention over latents"] = lambda count: (
        DeepseekV3Config(**shape | experts | heads | latent | groups, num_hidden_layers=count)
    )
    rows |= kept(mixed)
    for name, config in rows.items():
        one, two = (captured(gpu, CHAIN, placed_verifier(config(count))) for count in (1, 2))
        found[name] = max(two[key] - one[key] for key in one)
    return found


def _hybrid_layers(gpu: FakeGpu) -> dict[str, int]:
    """Launches of layers of Phi and of hybrids, in the forward pass over a tree and where tokens are chosen."""
    phi = [captured(gpu, CHAIN, placed_verifier(PhiConfig(**SHAPE, **IDS, num_hidden_layers=n))) for n in (1, 2)]
    found = {"layer of Phi, with fused attention": max(phi[1][key] - phi[0][key] for key in phi[0])}
    for name, kinds in kept(HYBRIDS).items():
        # A recurrent layer and an attention layer, then another of each.
        configs = [of_layers(name, [0, kinds[-1], *kinds[:more]]) for more in range(1 + len(kinds))]
        for config in configs:
            if hasattr(config, "num_experts"):  # the experts' launches are counted in layers of mixtures
                config.num_experts, config.mlp_only_layers = 1, [*range(len(kinds) + 2)]
        totals = [_tree_launches(gpu, config) for config in configs]
        for (forward, choice), (wider, chosen), kind in zip(
            totals, totals[1:], ("recurrent", "attention"), strict=False
        ):
            found[f"{kind} layer of {name}"] = wider - forward
            if kind == "recurrent":
                found[f"recurrent layer of {name} where tokens are chosen"] = chosen - choice
    return found


def _tree_launches(gpu: FakeGpu, config: PreTrainedConfig) -> tuple[int, int]:
    """A captured round of one greedy sequence's tree: launches of the forward pass, and of the choice behind it."""
    device = FakeGraphDevice(gpu)
    engine = Engine(placed_verifier(config), engine_config(TREE, 1), DrafterNeeds(), device)
    engine.runner.prepare_trees()
    stages = [stage for stage, _ in engine.runner.graphs.stats.captured]
    forward, greedy, *_ = device.graphs[stages.index(Stage.BASE_VERIFICATION) :][: 1 + len(Choosing)]
    return forward.total(), greedy.total()


def captured(
    gpu: FakeGpu, shape: SpeculationConfig, loaded: LoadedModel, **more: Any
) -> dict[tuple[Stage, Choosing], int]:
    """Launches of a verifier's rounds at batch 1: of a forward pass, and of a choice behind it."""
    device = FakeGraphDevice(gpu)
    engine = Engine(loaded, engine_config(shape, 1, **more), DrafterNeeds((0,)), device)
    engine.runner.prepare_trees()
    found: dict[tuple[Stage, Choosing], int] = {}
    stages = [stage for stage, _ in engine.runner.graphs.stats.captured]
    for begin, stage in enumerate(stages):
        if stage in (Stage.BASE_DECODING, Stage.BASE_VERIFICATION):
            forward, *choices = device.graphs[begin : begin + 1 + len(Choosing)]
            found |= {
                (stage, how): forward.total() + graph.total() for how, graph in zip(Choosing, choices, strict=True)
            }
    return found


def _drafter_counts(gpu: FakeGpu, name: str, shape: SpeculationConfig) -> dict[str, int]:
    free, ruled = _captured_drafts(gpu, shape, own=False)
    few, _ = _captured_drafts(gpu, shape, own=True)
    level = free[-1] - free[-2]
    found = {f"level of a {name}": level, f"draft of one level, {name}": free[0]}
    found[f"level of a {name} by own products of few rows"] = few[-1] - few[-2]
    if ruled:
        found[f"rules in a level of a {name}"] = ruled[-1] - ruled[-2] - level
        found[f"rules in a draft of one level, {name}"] = ruled[0] - free[0]
    return found


def _captured_drafts(gpu: FakeGpu, shape: SpeculationConfig, *, own: bool) -> tuple[list[int], list[int]]:
    """Launches of captured drafts by number of levels: without rules, and with.

    Args:
        own: whether the head's products are ours, as they are where these are faster.
    """
    device = FakeGraphDevice(gpu)
    drafter = new_drafter("eagle-3", shape, device)
    if own:
        own_products(drafter.head.fused_level.products.values())
    attach(drafter, shape, num_slots=1)
    by_stage = dict(zip(drafter.graph_stats.captured, device.graphs, strict=True))
    free, ruled = (
        [graph.total() for (stage, _), graph in sorted(by_stage.items()) if stage == wanted]
        for wanted in (Stage.DRAFT_PROPOSAL, Stage.DRAFT_RULED)
    )
    return free, ruled


def own_products(products: Iterable[Any]) -> None:
    """Lets products of few rows use their kernels."""
    for product in products:
        product.own = (True,) * len(product.own)


def _whole_drafts(gpu: FakeGpu) -> dict[str, int]:
    """Launches for decided tokens and a tree in five levels of four, for one sequence."""
    found, shape = {}, SpeculationConfig(draft_steps=5, draft_top_k=4, verify_tree_size=16)
    for name, (kind, num_layers) in kept(WHOLE_DRAFTS).items():
        for how, device in (("eager", None), ("captured", FakeGraphDevice(gpu))):
            drafter = new_drafter(kind, shape, device, num_layers)
            batch = decided(attach(drafter, shape, num_slots=1))
            gpu.strict = True
            gpu.launches.clear()
            with torch.inference_mode():
                drafter.draft(batch)
            gpu.strict = False
            found[f"draft by {name}, {how}"] = gpu.launches.total()
    return found


def decided(spec: ChannelSpec) -> DraftBatch:
    """A batch of one sequence, of which some tokens were decided and for which a tree is requested."""
    one, slot = torch.ones(1, dtype=torch.int64, device=CUDA), torch.zeros(1, dtype=torch.int64)
    path = one.new_ones(1, spec.max_path)
    taps = torch.ones(1, spec.max_path, spec.taps_size, dtype=spec.taps_dtype, device=CUDA)
    tables = one.new_ones(1, spec.max_blocks_per_seq)
    by_slot = (one, one, tables, one.to(torch.float32), one, one.new_ones(1, spec.max_model_len + 1))
    chunks = ([], [], [], one[:0], taps[0, :0])
    return DraftBatch(slot, one, one, path, taps, *chunks, slot, *by_slot, spec.max_model_len, last_token_ids=one)


def _round_counts(gpu: FakeGpu) -> dict[str, int]:
    found = {}
    asked, most = {"filtered": SAMPLED, "biased and penalized": ALTERED}, {}
    for name, shape in {"plain": TREE, **SHAPES, **dict.fromkeys(asked, TREE)}.items():
        gpu.strict = False
        drafter = None if name == "plain" else new_drafter("eagle-3", shape, FakeGraphDevice(gpu))
        served = serve(gpu, engine_config(shape, 1), drafter, [asked.get(name, GREEDY)], build=stages_apart)
        totals = [beside(launches) for launches in served.launches if launches["graph"] == served.num_graphs]
        found[f"beside the graphs of a round, {name}"], most[name] = min(totals), max(totals)
    # Rounds that write new rows beside: they have as many more launches as others.
    found |= {f"rules beside the graphs of a round, {name}": most[name] - most["tree"] for name in asked}
    gpu.strict = False
    return found


def stages_apart(*given: Any) -> Engine:
    """Build an engine whose rounds are never one graph."""
    engine = build_engine(*given)
    engine.runner.whole = None
    return engine


def _one_graph_counts(gpu: FakeGpu) -> dict[str, int]:
    """Launches of the host in a steady round, graphs and the download of tokens included, and kernels of the graphs."""
    found = {}
    for name, shape in SHAPES.items():
        kernels = []
        for how, build in kept({"apart": stages_apart, "one graph": build_engine}).items():
            gpu.strict = False
            drafts = FakeGraphDevice(gpu)
            drafter = new_drafter("eagle-3", shape, drafts)
            served = serve(gpu, engine_config(shape, 1), drafter, [replace(GREEDY, max_tokens=8)], build=build)
            is_apart = build is stages_apart
            rounds = [launches for launches in served.launches if launches["graph"] == (3 if is_apart else 1)]
            found[f"a {name}'s round by the host, {how}"] = min(launches.total() for launches in rounds)
            captured = [*served.engine.runner.graphs.stats.captured, *drafter.graph_stats.captured]
            graphs = [*served.device.graphs, *drafts.graphs]
            # Graphs of greedy choices are captured first, and are those that remain.
            made = dict(reversed([*zip(captured, graphs, strict=True)]))
            draft = (Stage.DRAFT_PROPOSAL, Bucket(1, shape.max_path - 1))
            of_trees = [(stage, Bucket(1, shape.num_nodes)) for stage in (Stage.BASE_VERIFICATION, Stage.BASE_CHOICE)]
            whole = [(Stage.WHOLE_ROUND, Bucket(1, shape.num_nodes))]
            kernels.append(sum(made[key].total() for key in ([*of_trees, draft] if is_apart else whole)))
        found[f"a {name}'s round in one graph over its graphs apart"] = kernels[-1] - kernels[0]
    gpu.strict = False
    return found


def _prompts_of_drafters(gpu: FakeGpu) -> dict[str, int]:
    """Launches of a head's pass over the prompts of three sequences."""
    found = {}
    for how, device in (("eager", None), ("captured", FakeGraphDevice(gpu))):
        drafter = new_drafter("eagle-3", CHAIN, device)
        spec = attach(drafter, CHAIN, num_slots=3)
        one = decided(spec)
        lengths = [7, 40, 3]
        batch = one._replace(
            **{name: part[:0] for name, part in one._asdict().items() if name.startswith("decode_")},
            proposal_slots=one.proposal_slots[:0],
            chunk_slots=[0, 1, 2],
            chunk_positions=[0, 8, 0],
            chunk_lens=lengths,
            chunk_next_token_ids=torch.ones(sum(lengths), dtype=torch.int64, device=CUDA),
            chunk_taps=torch.ones(sum(lengths), spec.taps_size, dtype=spec.taps_dtype, device=CUDA),
            block_tables=torch.ones(3, spec.max_blocks_per_seq, dtype=torch.int64, device=CUDA),
        )
        gpu.strict = True
        gpu.launches.clear()
        with torch.inference_mode():
            drafter.draft(batch)
        gpu.strict = False
        found[f"a head's pass over three prompts, {how}"] = gpu.launches.total()
    return found


def _mixed_counts(gpu: FakeGpu) -> dict[str, int]:
    """Launches of rounds in which one sequence decodes while prompts of others are computed."""
    captured = [_mixed_round(gpu, num_chunks, num_graphs=2) for num_chunks in (1, 2)]
    eager = [_mixed_round(gpu, 1, num_graphs=1, num_layers=num_layers) for num_layers in (1, 2)]
    per_layer = eager[1] - eager[0]
    return {
        "layer of a mixed round": per_layer,
        "beside the graphs of a mixed round": captured[0],
        "eager mixed round beside its layers and its graph": eager[0] - per_layer,
        "another prompt chunk in a mixed round": captured[1] - captured[0],
    }


def _mixed_round(gpu: FakeGpu, num_chunks: int, num_graphs: int, num_layers: int = 1) -> int:
    """Launches beside so many graphs: the choice of tokens, and the forward pass where one holds it."""
    graphs = True if num_graphs == 2 else "decode_only"
    config = engine_config(TREE, 3, max_num_batched_tokens=64, cuda_graphs=graphs)
    engine = Engine(verifier(num_layers), config, DrafterNeeds(), FakeGraphDevice(gpu))
    engine.add_request(Request("first", (1, 2, 3), GREEDY))
    engine.step()
    for number in range(num_chunks):
        engine.add_request(Request(str(number), (1,) * (7 + number), GREEDY))
    gpu.launches.clear()
    engine.step()
    assert gpu.launches["graph"] == num_graphs
    return beside(gpu.launches)


def _prompt_counts(gpu: FakeGpu) -> dict[str, int]:
    """Launches of rounds of prompts alone, whose first tokens are sampled."""
    eager = [_prompt_round(gpu, 1, "decode_only", num_layers) for num_layers in (1, 2)]
    captured = [_prompt_round(gpu, num_prompts, "full") for num_prompts in (1, 2)]
    per_layer = eager[1] - eager[0]
    return {
        "layer of an eager round of prompts": per_layer,
        "eager round of prompts beside its layers": eager[0] - per_layer,
        "beside the graph of a round of prompts": captured[0],
        "another prompt in a round of prompts": captured[1] - captured[0],
    }


def _prompt_round(gpu: FakeGpu, num_prompts: int, mode: str, num_layers: int = 1) -> int:
    """Launches beside the graph that a round of this mode has."""
    config = engine_config(TREE, 3, max_num_batched_tokens=64, cuda_graphs=mode)
    engine = Engine(verifier(num_layers), config, DrafterNeeds((0,)), FakeGraphDevice(gpu))
    for number in range(num_prompts):
        engine.add_request(Request(str(number), (1,) * (7 + number), GREEDY))
    gpu.launches.clear()
    engine.step()
    assert gpu.launches["graph"] == (mode == "full")
    return beside(gpu.launches)


def beside(launches: Counter[str]) -> int:
    """Launches of a round that no graph makes."""
    return launches.total() - launches["graph"]


def attach(drafter: StagedDrafter, speculation: SpeculationConfig, num_slots: int) -> ChannelSpec:
    """Make room for a verifier of these trees."""
    config = engine_config(speculation, num_slots)
    spec = ChannelSpec(
        num_slots=num_slots,
        num_nodes=speculation.num_nodes,
        max_path=speculation.max_path,
        max_prefill_tokens=16,
        taps_size=taps_size(drafter),
        max_model_len=config.max_model_len,
        max_blocks_per_seq=config.max_blocks_per_seq,
        block_size=config.block_size,
        num_blocks=64,
        taps_dtype=torch.bfloat16,
    )
    drafter.resize(spec, num_slots, 64)
    return spec


def main() -> int:
    """Print the table."""
    if (reason := why_not()) is not None:
        print(f"launch_counts: no fake GPU: {reason}", file=sys.stderr)
        return 1
    with fake_gpu() as gpu:
        found = counts(gpu)
    print("| launches | count |\n|---|---:|")
    for name, count in found.items():
        print(f"| {name} | {count} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
