"""Drafters always get the current slot state, though little of the state is written in a round."""

import torch

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.protocol.messages import ChannelSpec, Outcome, outcome_layout
from wingbeat.runtime.protocol.transfer import copy_all
from wingbeat.runtime.round.slots import SlotState
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import SchedulerOutput
from wingbeat.runtime.scheduling.sequence import Sequence

CONFIG = EngineConfig(max_num_seqs=3, max_model_len=64)
SPEC = ChannelSpec(
    num_slots=3,
    num_nodes=4,
    max_path=4,
    max_prefill_tokens=8,
    taps_size=2,
    max_model_len=64,
    max_blocks_per_seq=CONFIG.max_blocks_per_seq,
    block_size=CONFIG.block_size,
    num_blocks=16,
)
PUBLISHED = ("epochs", "committed_lens", "block_tables", "temperatures", "seeds")


def new_state():
    return SlotState(CONFIG, 10, torch.device("cpu"))


def new_outcome():
    return Outcome(**{name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in outcome_layout(SPEC).items()})


def sequence(slot, epoch, seed=5, temperature=0.5):
    seq = Sequence(Request(str(slot), (1, 2, 3), SamplingParams(max_tokens=8, temperature=temperature, seed=seed)))
    seq.slot, seq.epoch, seq.blocks = slot, epoch, [slot + 1]
    return seq


def plan(decodes, admitted=()):
    return SchedulerOutput(list(decodes), [], list(admitted), 0)


def assert_published(state, outcome):
    for name in PUBLISHED:
        assert torch.equal(getattr(outcome, name), getattr(state, name)[:-1]), name


def test_every_buffer_gets_every_change():
    state, buffers = new_state(), [new_outcome(), new_outcome()]
    seqs = [sequence(0, 4), sequence(2, 6, seed=9, temperature=0.0)]
    state.load(plan(seqs, seqs))
    for number in range(8):
        state.committed_lens[0] += 1
        if number == 3:
            seqs[0].blocks.append(7)
            state.load(plan(seqs))
        if number == 5:
            seqs[1] = sequence(2, 8, seed=11)
            state.load(plan(seqs, seqs[1:]))
        copy_all(state.publish(buffers[number % 2]))
        assert_published(state, buffers[number % 2])


def test_what_a_buffer_holds_is_not_written_again():
    state, outcome = new_state(), new_outcome()
    seqs = [sequence(0, 4)]
    state.load(plan(seqs, seqs))
    copy_all(state.publish(outcome))
    outcome.seeds.fill_(-1)
    state.committed_lens[0] += 1
    copy_all(state.publish(outcome))
    assert (outcome.seeds == -1).all()
    assert torch.equal(outcome.committed_lens, state.committed_lens[:-1])


def test_another_drafter_gets_everything():
    state, outcome = new_state(), new_outcome()
    seqs = [sequence(0, 4)]
    state.load(plan(seqs, seqs))
    copy_all(state.publish(outcome))
    for name in PUBLISHED:
        getattr(outcome, name).zero_()
    state.forget_published()
    copy_all(state.publish(outcome))
    assert_published(state, outcome)


def test_rows_follow_the_batch():
    state, seqs = new_state(), [sequence(0, 1), sequence(1, 1)]
    rows = state.load(plan(seqs, seqs))
    assert (rows.slots.tolist(), rows.wanted.tolist()) == ([0, 1], [0, 0])
    assert state.load(plan(seqs)) is rows
    seqs[1].draft.tree_requested = True
    assert state.load(plan(seqs)).wanted.tolist() == [0, 1]
    assert state.load(plan(seqs[1:])).slots.tolist() == [1]
    assert state.load(plan([])).slots.tolist() == []
    assert rows.wanted.tolist() == [0, 0]
