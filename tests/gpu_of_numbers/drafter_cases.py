"""Every kind of drafter with weights, loaded onto the GPU of numbers: its captured trees are those of the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_of_numbers.device import CUDA
from tests.runtime.by_torch import by_torch
from tests.runtime.draft_world import MIXED, NUM_SLOTS, World, channel_spec, taps_size
from tests.runtime.drafters.test_eagle_stages import assert_same
from tests.runtime.feature_kinds import of_features
from tests.runtime.models import random_head, reference
from tests.runtime.rule_rows import rules_of
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters import draft_stages
from wingbeat.runtime.drafters.base import DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.staged_drafter import StagedDrafter
from wingbeat.runtime.fused.levels import FusedLevel
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.parts import hooks
from wingbeat.runtime.protocol.messages import TokenTree

LENS = (2, 9, 17)
SHAPES = {
    "chain": SpeculationConfig(draft_steps=2, draft_top_k=1, verify_tree_size=3),
    "tree": SpeculationConfig(draft_steps=2, draft_top_k=2, verify_tree_size=5),
}
KINDS = (
    *(
        "eagle",
        "eagle-own",
        "eagle-fp8",
        "draft-model",
        "foreign-vocabulary",
        "mtp",
        "shared_keys",
        "p-eagle",
        "dflash",
    ),
    *("dspark-rnn", "dflash2"),
)


def eagle_folders(root: Path) -> tuple[Path, str]:
    reference("llama").loaded.model.save_pretrained(root / "verifier")
    save_eagle_head(random_head(reference("llama").loaded), root / "drafter")
    return root / "verifier", str(root / "drafter")


FOLDERS = {"eagle": eagle_folders, "eagle-own": eagle_folders, "eagle-fp8": eagle_folders, **of_features("FOLDERS")}


def take_own_products(level: FusedLevel, head: Any) -> None:
    """In place of `FusedLevel.choose`: as where all of its kernels are faster."""
    for product in level.products.values():
        product.own = (True,) * len(product.own)


def attached(source: str, verifier: Path, shape: SpeculationConfig, options: DrafterOptions) -> StagedDrafter:
    drafter = load_drafter(source, TargetDescription.from_checkpoint(verifier), shape, options)
    spec = channel_spec(shape, taps_size(drafter))
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    return drafter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_captured_trees_are_those_of_the_cpu(gpu, kind, shape, tmp_path, monkeypatch):
    """Batches of 3 and 1, one level and two, greedy beside sampled, with rules and without; eagerly too where
    graphs are turned off."""
    monkeypatch.setattr(draft_stages, "draft_batches", lambda *sizes: (1, 3))
    if kind == "eagle-own":
        monkeypatch.setattr(FusedLevel, "choose", take_own_products)
    with torch.inference_mode(mode=False):
        verifier, source = FOLDERS[kind](tmp_path)
        fp8 = kind == "eagle-fp8"
        options = [DrafterOptions(device=CUDA, cuda_graphs=captured, fp8_weights=fp8) for captured in (True, False)]
        # The CPU's kernels round what they draft with.
        expected = by_torch(lambda: attached(source, verifier, SHAPES[shape], DrafterOptions(fp8_weights=fp8)))
        drafters = [attached(source, verifier, SHAPES[shape], each) for each in options]
    world = World(SHAPES[shape], taps_size(expected), LENS, MIXED)
    world.feed(expected)
    for drafter in drafters:
        world.feed(drafter, CUDA)
    masks = torch.tensor([[0x5555_5555] * 4, [-1] * 4, [0x0F0F_0F0F] * 4], dtype=torch.int32)
    ruled = {"sampling_rules": rules_of(NUM_SLOTS), "allowed_tokens": masks}
    for count, depth, rules in ((3, 2, {}), (1, 1, {}), (3, 2, ruled), (1, 2, {}), (3, 2, {"allowed_tokens": masks})):
        slots = world.slots[-count:]
        decodes = [(slot, int(world.lens[slot]) - 1, 1 + slot % 2) for slot in slots]
        for slot, _, more in decodes:
            world.lens[slot] += more
        rounds = {"decodes": decodes, "proposals": slots, "max_levels": depth}
        batch = world.batch(**rounds)._replace(**rules)
        wanted = expected.draft(batch)
        on_device = {name: _moved(value) for name, value in rules.items()}
        for drafter in drafters:
            tree = drafter.draft(world.batch(**rounds, device=CUDA)._replace(**on_device))
            assert_same(TokenTree(*(part.cpu() for part in tree)), wanted, 1e-3)
    if kind == "eagle-own":
        assert gpu.launches["_embed_to_heads_kernel"] > 0
    captured, eager = (drafter.graph_stats for drafter in drafters)
    assert eager is None
    assert captured.failed == []
    assert not captured.eager_runs
    proposals = {Stage.DRAFT_PROPOSAL: 3, Stage.DRAFT_RULED: 2} if hooks("draft_rules") else {Stage.DRAFT_PROPOSAL: 5}
    replays = {stage: count for stage, count in captured.replays.items() if stage != Stage.DRAFT_PREFILL}
    assert replays == {**proposals, Stage.DRAFT_ACCEPT: 1}


def _moved(value: Any) -> Any:
    return value.to(CUDA) if isinstance(value, torch.Tensor) else type(value)(*(part.to(CUDA) for part in value))
