"""Pairs of rounds without trees reach the drafter later, in order and in few messages."""

from dataclasses import replace

import pytest
import torch

from tests.runtime.models import TREE, Run, engine_config, greedy_params, new_engine, reference
from tests.runtime.scripted import ScriptedDrafter, right_tree
from wingbeat.runtime.adaptive.policy import SpeculationPolicy
from wingbeat.runtime.drafters.base import DrafterNeeds


class CountingDrafter(ScriptedDrafter):
    """Counts what it is rung for and checks that the pairs of each sequence follow one another."""

    def __init__(self, *args):
        super().__init__(*args)
        self.needs = DrafterNeeds((1,), keeps_context=True)
        self.counts = False
        self.num_passes = self.num_chunk_tokens = 0
        self.ends = {}

    def commit(self, batch):
        if not self.counts:  # rows of the calibration belong to no sequence
            return
        self.num_passes += 1
        self.num_chunk_tokens += sum(batch.chunk_lens)
        history = batch.token_ids
        row = 0
        for slot, start, count in zip(batch.chunk_slots, batch.chunk_positions, batch.chunk_lens, strict=True):
            assert start in (0, self.ends.get(slot))
            self.ends[slot] = start + count
            known = history[slot, start + 1 : start + count + 1]
            assert torch.equal(batch.chunk_next_token_ids[row : row + count], known)
            row += count
        decodes = (batch.decode_slots, batch.decode_positions, batch.decode_num_tokens)
        for slot, start, count in zip(*(column.tolist() for column in decodes), strict=True):
            assert start == self.ends[slot]
            self.ends[slot] = start + count


class NeverPays(SpeculationPolicy):
    """A policy that decodes plainly except for one draft every `every` rounds."""

    every = 40
    rounds = 0

    def plan(self, *load):
        self.rounds += 1
        return super().plan(*load)._replace(levels=0 if self.rounds % self.every else self.max_levels)


@pytest.mark.parametrize("overlap", [False, True])
def test_plain_rounds_are_kept_back_and_handed_over_in_order(monkeypatch, overlap):
    monkeypatch.setattr("wingbeat.runtime.adaptive.measured.SpeculationPolicy", NeverPays)
    ref = reference("llama")
    drafter = CountingDrafter(ref.sequences, right_tree, ref.loaded.vocab_size)
    config = engine_config(replace(TREE, adaptive=True), overlap=overlap, max_num_seqs=4)
    engine = new_engine(ref.loaded, config, drafter)
    drafter.counts = True
    run = Run(engine, ref.prompts[:4], greedy_params())
    tokens = run.finish()
    engine.model.remove_taps()
    assert tokens == ref.continuations[:4]
    rounds = engine.stats().phases.num_rounds
    assert drafter.num_passes < rounds / 3
    assert engine.stats().speculation.num_drafts > 0
    # Every pair was sent in a chunk or a decode row, except those that were still deferred at the end.
    assert drafter.num_chunk_tokens > sum(len(prompt) for prompt in ref.prompts[:4])
