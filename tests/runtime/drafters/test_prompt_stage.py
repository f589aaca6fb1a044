"""Prompt chunks of uneven lengths are committed by captured passes as by eager ones, and padding is never seen."""

import pytest
import torch

from tests.runtime.draft_world import BLOCK_SIZE, MIXED, World, taps_size
from tests.runtime.drafters.test_draft_stages import attached, by_shape, couplings_of_a_device, few_batches, kinds
from tests.runtime.drafters.test_eagle_stages import assert_same
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.runtime.drafters import prompt_stage
from wingbeat.runtime.graphs.graph_runner import Stage

__all__ = ["couplings_of_a_device", "kinds"]

LENS = (3, 34, 60, 40, 58, 2)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", ["eagle", "mtp-3", "draft-model", "draft-model-windows", "shared_keys", "dflash"])
@by_shape
@torch.inference_mode()
def test_uneven_chunks_are_committed_as_by_eager_passes(kinds, kind, speculation, monkeypatch):
    """Chunks end within pieces and between them; a pass takes several replays, and later chunks follow earlier ones."""
    few_batches(monkeypatch)
    monkeypatch.setattr(prompt_stage, "SIZES", (1, 2))
    eager, captured = attached(kinds, kind, speculation), attached(kinds, kind, speculation, RecordingDevice())
    world = World(speculation, taps_size(eager), LENS, MIXED)
    slots, trees = world.slots, []
    for drafter in (eager, captured):
        for part in (*(part for pair in drafter.pool.caches for part in pair), *getattr(drafter.pool, "extras", ())):
            part.fill_(50.0)
        ends = {slot: int(world.lens[slot]) - 1 for slot in slots}
        cuts = {slot: min(end, 1 + 11 * (index % 4)) for index, (slot, end) in enumerate(ends.items())}
        drafter.draft(world.batch(chunks=[(slot, 0, cut) for slot, cut in cuts.items()]))
        rest = [(slot, cuts[slot], ends[slot] - cuts[slot]) for slot in slots if cuts[slot] < ends[slot]]
        assert max(length for _, _, length in rest) > prompt_stage.PIECE_ROWS
        trees.append(drafter.draft(world.batch(chunks=rest, proposals=slots)))
    assert_same(trees[1], trees[0], 1e-4)
    stats = captured.graph_stats
    assert stats.failed == []
    assert stats.replays[Stage.DRAFT_PREFILL] > 4
    for ours, theirs in zip(captured.pool.caches, eager.pool.caches, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            for slot in slots:
                num_stored = int(world.lens[slot]) - 1 - 2 * kind.startswith("mtp")
                places = torch.arange(world.tables.shape[1] * BLOCK_SIZE)
                rows = world.tables[slot, places // BLOCK_SIZE], places % BLOCK_SIZE
                committed = places < num_stored
                torch.testing.assert_close(mine[rows][committed], other[rows][committed], atol=1e-4, rtol=0)
                # Drafted rows take the rest of the last block that has committed rows.
                behind = places >= -(-int(world.lens[slot]) // BLOCK_SIZE) * BLOCK_SIZE
                assert bool((mine[rows][behind] == 50.0).all()), "padding is stored nowhere"
