"""Heads that draft in one pass, loaded from files and fed with the sequences of a world."""

from pathlib import Path
from types import SimpleNamespace

import torch

from tests.runtime.draft_world import BLOCK_SIZE, NUM_SLOTS, World, channel_spec
from tests.runtime.one_pass.one_pass_world import HIDDEN, VOCAB, save_head
from wingbeat.runtime.one_pass.load import load_one_pass_head, read_one_pass_checkpoint
from wingbeat.runtime.one_pass.one_pass_drafter import OnePassDrafter

NUM_TARGET_LAYERS = 8
TAPS = (-1, 2, 5)
TARGET = SimpleNamespace(
    hidden_size=HIDDEN, num_layers=NUM_TARGET_LAYERS, vocab_size=VOCAB, embedding=lambda: None, lm_head=lambda: None
)
LENS = (2, 9, 17, 40, 1 + BLOCK_SIZE, 2 * BLOCK_SIZE)
FULL, CAUSAL = (False, None), (True, None)
"""Masks of a layer as `Reference` has them."""


def load(folder: Path, raw, tensors, dtype=torch.float32):
    """The head that a config and tensors are, by way of their files."""
    return load_one_pass_head(read_one_pass_checkpoint(save_head(folder, raw, tensors)), TARGET, dtype, "cpu")


def fed(head, speculation, kind=OnePassDrafter, lens=LENS, temperatures=(0.0,) * NUM_SLOTS):
    """A drafter that has taken in every sequence of a world."""
    drafter = kind(head, speculation)
    spec = channel_spec(speculation, head.taps_size)
    drafter.resize(spec, spec.num_slots, spec.num_blocks)
    world = World(speculation, head.taps_size, lens, temperatures)
    with torch.inference_mode():
        world.feed(drafter)
    return drafter, world


def trees_of(drafter, world):
    with torch.inference_mode():
        return drafter.propose(world.batch(proposals=world.slots))
