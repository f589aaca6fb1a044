"""Prompt chunks beside decodes that are replayed: in pieces of equal height, and nothing of a text changes."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.needs import needs
from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, random_prompts, reference
from tests.runtime.recorded_graphs import RecordingDevice, RepeatingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round.flight import RoundObserver
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, in_pieces, side_by_side
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.scheduling.scheduler import Chunk

pytestmark = pytest.mark.few(1)


COUNTS = (24, 4, 12, 4, 8)


class Rounds(RoundObserver):
    """Keeps what was launched."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        """Decodes and chunks of each round."""

    def launched(self, flight) -> None:
        self.sizes.append((len(flight.plan.decodes), len(flight.plan.chunks)))


def engine_of(ref, drafter, device, **overrides):
    rounds = Rounds()
    engine = build_engine(ref.loaded, engine_config(**overrides), drafter, InProcessChannel, device)
    engine.observe(rounds)
    return engine, rounds


def replays(engine) -> int:
    counts = engine.stats().graphs.replays
    return sum(counts.get(stage, 0) for stage in (Stage.BASE_DECODING, Stage.BASE_VERIFICATION, Stage.BASE_MIXED))


@needs("prompt_graphs")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_decodes_are_replayed_beside_chunks_and_write_the_same(model, overlap):
    """Two slots for all: prompts that come in while another sequence decodes, in chunks of one and of more pieces."""
    ref = reference(model)
    engine, rounds = engine_of(
        ref,
        eagle_drafter(ref.loaded, TREE),
        RecordingDevice(),
        max_num_seqs=2,
        max_num_batched_tokens=40,
        overlap=overlap,
    )
    try:
        texts = Run(engine, ref.prompts[:5], [greedy_params(count) for count in COUNTS]).finish()
    finally:
        engine.model.remove_taps()
    assert texts == [tokens[:count] for tokens, count in zip(ref.continuations[:5], COUNTS, strict=True)]
    mixed = [size for size in rounds.sizes if all(size)]
    assert mixed
    assert replays(engine) == sum(1 for num_decodes, _ in rounds.sizes if num_decodes)
    assert not engine.stats().graphs.eager_runs


def test_sampled_and_reported_tokens_of_a_mixed_round_are_those_of_a_request_alone():
    ref, prompts = reference("llama"), random_prompts((9, 70, 33), seed=5)
    params = [
        SamplingParams(
            max_tokens=12,
            temperature=0.8,
            seed=n,
            ignore_eos=True,
            logprobs=2,
            prompt_logprobs=1,
            repetition_penalty=1.3,
        )
        for n in range(3)
    ]
    told = []
    for max_num_seqs in (1, 3):
        engine, _ = engine_of(
            ref, None, RepeatingDevice(), max_num_seqs=max_num_seqs, max_num_batched_tokens=48, overlap=False
        )
        run = Run(engine, prompts, params)
        try:
            tokens = run.finish()
        finally:
            engine.model.remove_taps()
        told.append(tokens)
    assert told[0] == told[1]


def chunk(slot: int, start: int, length: int, replay: bool = False) -> Chunk:
    seq = SimpleNamespace(slot=slot, token_ids=list(range(1000 * slot, 1000 * slot + 300)), wants_prompt_logprobs=False)
    return Chunk(seq, start, length, samples=not replay, replay=replay)


def test_pieces_hold_each_token_once_at_its_place():
    chunks = [chunk(3, 7, PIECE_ROWS), chunk(1, 0, 5), chunk(2, 60, 2 * PIECE_ROWS + 1, replay=True)]
    rows = in_pieces(chunks, last_position=150)
    close = side_by_side(chunks)
    assert rows.slots.tolist() == [3, 1, 2, 2, 2]
    assert rows.contexts.tolist() == [7, 0, 60, 60 + PIECE_ROWS, 60 + 2 * PIECE_ROWS]
    for name in ("token_ids", "stores"):
        assert getattr(rows, name)[rows.real].tolist() == getattr(close, name).tolist()
    assert rows.positions[rows.real].tolist() == np.minimum(close.positions, 150).tolist()
    padding = np.setdiff1d(np.arange(len(rows.token_ids)), rows.real)
    assert not rows.stores[padding].any(), "nothing of the padding is stored"
    assert rows.positions.max() <= 150
    assert rows.wanted.tolist() == close.wanted.tolist() == [PIECE_ROWS - 1, PIECE_ROWS + 4]
