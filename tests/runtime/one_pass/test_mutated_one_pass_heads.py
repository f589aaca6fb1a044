"""A one-pass head's config.json with one field wrong: refused by one line, or read as a head that drafts numbers."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.runtime.mutations import Mutation, mutations, some
from tests.runtime.one_pass.one_pass_drafts import TAPS, TARGET
from tests.runtime.one_pass.one_pass_world import VOCAB, random_tensors, raw_config, save_head
from tests.runtime.one_pass.parallel_eagle_world import parallel_config, parallel_tensors
from wingbeat.runtime.heads.files import CheckpointError, read_config, read_shapes
from wingbeat.runtime.one_pass.families import OnePassFamily, one_pass_family
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.parallel_eagle import ParallelEagleHead, load_parallel_head

CONFIG = "config.json"
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "is_causal": False}


@pytest.fixture(params=["dflash", "dspark-gated", "dflash2", "p-eagle"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "p-eagle":
        raw = parallel_config((0, 3, 6), 2)
        return save_head(tmp_path / "head", raw, parallel_tensors(raw))
    raw = raw_config(request.param, TAPS, 2, **SLIDING, max_position_embeddings=128, num_target_layers=8)
    return save_head(tmp_path / "head", raw, random_tensors(raw))


def check(saved: Path, folder: Path, mutation: Mutation) -> None:
    shutil.copytree(saved, folder)
    mutation.write(folder)
    head, lines = None, []
    try:
        if one_pass_family(read_config(folder), read_shapes(folder)) is None:
            return  # it is another kind of drafter's now, whose own tests these are
        checkpoint = read_one_pass_checkpoint(folder)
        load = load_parallel_head if checkpoint.family is OnePassFamily.PEAGLE else load_one_pass_head
        head = load(checkpoint, TARGET, torch.float32, "cpu")
    except CheckpointError as error:
        lines = str(error).splitlines()
    if head is None:
        assert len(lines) == 1, lines
        return
    positions = torch.arange(3) + 90
    features = head.fuse(torch.randn(3, head.taps_size))
    if isinstance(head, ParallelEagleHead):
        attends = [lambda query, key, value: query] * head.config.num_layers
        out = head.logits(head.run_layers(torch.arange(3), features, head.rotary(positions), attends))
    else:
        assert all(part.isfinite().all() for pair in head.context(features, head.rotary(positions)) for part in pair)
        attends = [lambda query, key, value: query] * head.config.num_layers
        rotary = head.rotary(torch.arange(head.config.block_size)[None])
        walk = head.walk(head.run_block(torch.tensor([3]), rotary, attends))
        out = walk.step(0, torch.tensor([[3]]), torch.tensor([[0]])).logits
    assert out.isfinite().all(), mutation
    assert int(head.draft_token_ids.max()) < VOCAB, mutation


@pytest.mark.few(1)
def test_one_wrong_field_is_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    for index, mutation in enumerate(some(mutations(saved, CONFIG), 60)):
        check(saved, tmp_path / str(index), mutation)


@pytest.mark.slow
def test_every_wrong_field_is_refused_or_harmless(saved: Path, tmp_path: Path) -> None:
    for index, mutation in enumerate(mutations(saved, CONFIG)):
        check(saved, tmp_path / str(index), mutation)
