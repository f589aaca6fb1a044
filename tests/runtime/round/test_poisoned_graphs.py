"""Nothing of a graph is read once another graph of its pool ran: verifiers' and drafters' outputs are taken in time."""

import pytest
import torch

from tests.runtime.models import Run, engine_config, greedy_params, random_head, reference
from tests.runtime.poisoned_graphs import POISON, PoisoningDevice
from tests.runtime.recorded_graphs import RecordingDevice, RepeatingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine

SHAPES = {
    "chain": SpeculationConfig(draft_steps=2, draft_top_k=1, verify_tree_size=3),
    "tree": SpeculationConfig(draft_steps=2, draft_top_k=2, verify_tree_size=5),
}
COUNTS = (16, 6, 12)


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_that_grows_and_shrinks_reads_no_output_of_an_earlier_graph(shape):
    """Requests come and go, so that rounds of every batch size, plain and drafted, follow one another with overlap."""
    ref, devices = reference("llama"), (PoisoningDevice(RecordingDevice()), PoisoningDevice(RepeatingDevice()))
    drafter = EagleDrafter(random_head(ref.loaded), SHAPES[shape], devices[1])
    config = engine_config(SHAPES[shape], max_num_seqs=2, overlap=True)
    engine = build_engine(ref.loaded, config, drafter, InProcessChannel, devices[0])
    try:
        texts = Run(engine, ref.prompts[:3], [greedy_params(count) for count in COUNTS]).finish()
    finally:
        engine.model.remove_taps()
    assert texts == [tokens[:count] for tokens, count in zip(ref.continuations, COUNTS, strict=False)]
    assert all(device.num_poisoned for device in devices)
    assert engine.stats().graphs.replays[Stage.BASE_VERIFICATION]
    assert engine.stats().graphs.replays[Stage.BASE_MIXED]
    assert drafter.graph_stats.replays[Stage.DRAFT_PROPOSAL]


def test_what_is_kept_past_the_next_replay_is_ruined():
    device, x = PoisoningDevice(RecordingDevice()), torch.arange(3)
    first, (kept,) = device.capture(lambda: (x + 1,), None)
    second, (other,) = device.capture(lambda: (x * 2.0,), None)
    device.replay(first)
    assert kept.tolist() == [1, 2, 3]
    assert other.isnan().all()
    device.replay(second)
    assert (kept == POISON).all()
    assert other.tolist() == [0, 2, 4]
