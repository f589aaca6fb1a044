"""Decodes and prompt chunks of a round are one forward pass where rounds are captured; nothing of a text changes."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.needs import needs
from tests.runtime.models import TREE, Run, eagle_drafter, engine_config, greedy_params, reference
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.buckets import MOST_GRAPHS
from wingbeat.runtime.graphs.graph_runner import Bucket, Stage
from wingbeat.runtime.llm import build_engine, connect
from wingbeat.runtime.prompt_graphs.chunk_buffers import ChunkBuffers
from wingbeat.runtime.prompt_graphs.prompt_shapes import PromptShapes
from wingbeat.runtime.round.flight import RoundObserver
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS, in_pieces
from wingbeat.runtime.round.rows import ModelOutput
from wingbeat.runtime.round.shapes import (
    OF_ANOTHER_WIDTH,
    node_buckets,
    num_graphs,
    pieces_at_most,
    round_shapes,
)
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.scheduling.scheduler import Chunk
from wingbeat.runtime.verifier.model import VerifierModel

pytestmark = pytest.mark.few(1)

COUNTS = (24, 4, 12, 4, 8)
TWO_SLOTS = {"max_num_seqs": 2, "max_num_batched_tokens": 40, "overlap": False}


class Rounds(RoundObserver):
    """Decodes and chunks of each round, and what its chunks leave for the drafter."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []
        self.taps: list[Tensor] = []

    def launched(self, flight) -> None:
        self.sizes.append((len(flight.plan.decodes), len(flight.plan.chunks)))
        if flight.plan.chunks:
            self.taps.append(flight.chunk_taps.clone())

    @property
    def num_mixed(self) -> int:
        return sum(1 for size in self.sizes if all(size))


def run(device: RecordingDevice | None, params: SamplingParams | None = None, before=lambda engine: None):
    """Five requests through two slots: their tokens, the rounds, the graphs' statistics."""
    ref, rounds = reference("llama"), Rounds()
    engine = build_engine(
        ref.loaded, engine_config(**TWO_SLOTS), eagle_drafter(ref.loaded, TREE), InProcessChannel, device
    )
    engine.observe(rounds)
    before(engine)
    wanted = [greedy_params(count) if params is None else params for count in COUNTS]
    try:
        texts = Run(engine, ref.prompts[:5], wanted).finish()
    finally:
        engine.model.remove_taps()
    return texts, rounds, engine.stats().graphs


def expected() -> list[list[int]]:
    ref = reference("llama")
    return [tokens[:count] for tokens, count in zip(ref.continuations[:5], COUNTS, strict=True)]


def test_a_mixed_round_runs_the_model_once(monkeypatch):
    """Beside the captures: a replay records nothing anew, so that it is counted where it is not captured."""
    passes, forward = [], VerifierModel.forward

    def counted(model, batch):
        passes.append(len(batch.segments))
        return forward(model, batch)

    def eagerly(engine) -> None:
        engine.runner.graphs.pool.paused = True
        monkeypatch.setattr(VerifierModel, "forward", counted)

    texts, rounds, stats = run(RecordingDevice(), before=eagerly)
    assert texts == expected()
    assert rounds.num_mixed
    assert len(passes) == len(rounds.sizes)
    assert passes.count(2) == rounds.num_mixed == stats.eager_runs[Stage.BASE_MIXED]


@pytest.mark.slow
def test_what_chunks_leave_for_the_drafter_is_what_eager_rounds_leave():
    """In numbers as well as in text: of a captured round, of one that no graph holds, of a host."""
    no_graph = lambda engine: engine.runner.graphs.prompts.shapes.mixed.update(  # noqa: E731
        dict.fromkeys(engine.runner.graphs.prompts.shapes.mixed, ())
    )
    _, on_host, _ = run(None)
    captured_texts, captured, stats = run(RecordingDevice())
    eager_texts, eager, other = run(RecordingDevice(), before=no_graph)
    assert captured_texts == eager_texts == expected()
    assert stats.replays[Stage.BASE_MIXED] == other.eager_runs[Stage.BASE_MIXED] == captured.num_mixed > 0
    assert not stats.eager_runs
    assert other.replays[Stage.BASE_CHOICE] + other.eager_runs.get(Stage.BASE_CHOICE, 0) > captured.num_mixed
    for found in (captured, eager):
        assert found.sizes == on_host.sizes
        for taps, theirs in zip(found.taps, on_host.taps, strict=True):
            torch.testing.assert_close(taps, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("captured", [True, False])
def test_a_drafter_that_comes_late_is_given_in_mixed_rounds_what_it_lacks(captured):
    """Replays compute hidden states of what stands already, beside the decodes of the same sequences."""
    ref, rounds = reference("llama"), Rounds()
    drafter = eagle_drafter(ref.loaded, TREE)
    limits = engine_config(**TWO_SLOTS | {"max_num_batched_tokens": 12})
    engine = Engine(ref.loaded, limits, drafter.needs, RecordingDevice() if captured else None)
    try:
        requests = Run(engine, ref.prompts[:2], greedy_params(24))
        while not all(requests.tokens):
            requests.step()
        if captured:
            engine.runner.graphs.stats.forget_runs()
        engine.observe(rounds)
        connect(engine, drafter, InProcessChannel)
        assert requests.finish() == [tokens[:24] for tokens in ref.continuations[:2]]
        computed = torch.cat(rounds.taps)
        expected = torch.cat([engine.model.observe(torch.tensor([sequence]))[0] for sequence in ref.sequences[:2]])
    finally:
        engine.model.remove_taps()
    assert rounds.num_mixed == len(rounds.taps) > 1
    if captured:
        replayed = engine.stats().graphs.replays[Stage.BASE_MIXED]
        eager = engine.stats().graphs.eager_runs[Stage.BASE_MIXED]
        assert replayed + eager == rounds.num_mixed, "the round with a piece of both has no graph"
    nearest = torch.cdist(computed.double(), expected.double()).amin(dim=1)
    assert float(nearest.max()) < 1e-3, "each row is that of a token of the texts"


@pytest.mark.slow
def test_prompts_that_are_reported_take_the_eager_pass():
    wanted = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    texts, rounds, stats = run(RecordingDevice(), wanted)
    assert texts == [tokens[:6] for tokens in reference("llama").continuations[:5]]
    assert stats.eager_runs[Stage.BASE_MIXED] == rounds.num_mixed > 0
    assert Stage.BASE_MIXED not in stats.replays


@pytest.mark.slow
def test_a_mixed_round_whose_capture_failed_is_named_and_runs_eagerly(monkeypatch):
    keep = ChunkBuffers.keep

    def looking(buffers: ChunkBuffers, output: ModelOutput) -> None:
        assert output.logits.sum().item() < float("inf")
        keep(buffers, output)

    monkeypatch.setattr(ChunkBuffers, "keep", looking)
    texts, rounds, stats = run(RecordingDevice())
    assert texts == expected()
    assert stats.eager_runs[Stage.BASE_MIXED] == rounds.num_mixed > 0
    failed = [failure for failure in stats.failed if failure.stage == Stage.BASE_MIXED]
    assert failed
    assert str(failed[0].bucket) == f"2x1+{2 * PIECE_ROWS}"
    assert "not permitted when stream is capturing" in failed[0].reason


SHAPES = PromptShapes({16: (8, 32)}, pieces=(2, 8, 32), prompts=())
"""Shapes of rounds for trees of 16 nodes."""


@pytest.mark.parametrize(
    ("num_reqs", "num_pieces", "bucket"),
    [
        (1, 1, (8, 64)),
        (8, 2, (8, 64)),
        (8, 3, (8, 256)),
        (2, 3, (8, 256)),
        (9, 2, None),  # 208 rows for 576
        (16, 2, (32, 64)),
        (8, 9, None),  # 416 rows for 1152
        (8, 14, (8, 1024)),
        (32, 32, (32, 1024)),
        (33, 1, None),
        (1, 33, None),
    ],
)
def test_a_mixed_round_has_the_smallest_graph_that_holds_it_unless_it_is_mostly_padding(num_reqs, num_pieces, bucket):
    found = SHAPES.mixed_bucket(16, num_reqs, num_pieces)
    assert found == (None if bucket is None else Bucket(bucket[0], 16, bucket[1]))


@needs("adaptive")
def test_the_default_on_a_gpu_captures_mixed_rounds_of_every_width():
    """And leaves as many graphs to decodes alone as they need."""
    config = EngineConfig(max_num_seqs=128, max_num_batched_tokens=2048, speculation=SpeculationConfig(adaptive=True))
    shapes, prompts = round_shapes(config)
    assert num_graphs(config) == 71 + len(prompts.prompts) <= MOST_GRAPHS + OF_ANOTHER_WIDTH + 6
    assert prompts.mixed == {1: (128,), 4: (32, 128), 8: (16, 64), 16: (8, 32)}
    assert prompts.pieces == (2, 8)
    assert sum(len(shape.forwards) for shape in shapes.values()) == 21


@needs("adaptive")
@pytest.mark.parametrize(
    ("max_num_seqs", "top_k", "size", "widths"),
    [
        (16, 4, 60, (4, 8, 16, 32, 60)),
        (64, 4, 60, (4, 16, 60)),
        (64, 4, 16, (4, 8, 16)),
        (64, 1, 8, (4, 6, 8)),
        (16, 1, 16, (4, 6, 8, 16)),
    ],
)
def test_narrow_trees_of_many_sequences_have_every_width(max_num_seqs, top_k, size, widths):
    steps = size - 1 if top_k == 1 else 7
    shape = SpeculationConfig(draft_steps=steps, draft_top_k=top_k, verify_tree_size=size, adaptive=True)
    assert node_buckets(EngineConfig(max_num_seqs=max_num_seqs, speculation=shape)) == widths


@pytest.mark.parametrize("num_tokens", [1, 16, 33, 40, 100])
@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_the_most_pieces_are_those_of_the_worst_cut(num_tokens, num_chunks):
    worst = 0
    for count in range(1, num_chunks + 1):
        for rest in range(min(PIECE_ROWS, num_tokens - count + 1)):  # of all chunks but the first, beyond a token each
            lengths = [num_tokens - count + 1 - rest, *[1] * (count - 1)]
            lengths[-1] += rest
            worst = max(worst, sum(-(-length // PIECE_ROWS) for length in lengths))
    assert pieces_at_most(num_tokens, num_chunks) == worst


@torch.inference_mode()
def test_pieces_lie_where_captured_rounds_look_and_no_capture_stores_an_earlier_rounds_again():
    chunks = [chunk(2, 7, PIECE_ROWS + 3), chunk(1, 0, 5)]
    buffers = ChunkBuffers(SimpleNamespace(spare=4, device=torch.device("cpu")), 8)
    buffers.reserve(ModelOutput(torch.zeros(1, 11), torch.zeros(1, 3)))
    cut = in_pieces(chunks, 100)
    buffers.put(cut, 4)
    pieces = buffers.rows(4)
    assert pieces.slots.tolist() == [2, 2, 1, 4]
    assert pieces.contexts.tolist() == [7, 7 + PIECE_ROWS, 0, 0]
    assert pieces.wanted.tolist() == [PIECE_ROWS + 2, 2 * PIECE_ROWS + 4, 0, 0]
    for name in ("token_ids", "positions", "stores"):
        assert getattr(pieces, name)[: 3 * PIECE_ROWS].tolist() == getattr(cut, name).tolist()
        assert len(getattr(pieces, name)) == 4 * PIECE_ROWS
    assert not pieces.stores[3 * PIECE_ROWS :].any()
    rows = torch.arange(4.0 * PIECE_ROWS)[:, None]
    buffers.keep(ModelOutput(rows[:4].expand(-1, 11), rows.expand(-1, 3)))
    logits, taps = buffers.latest_output(4, num_samples=2, num_tokens=PIECE_ROWS + 8)
    assert logits[:, 0].tolist() == [0, 1]
    assert taps[:, 0].tolist() == cut.real.tolist()
    buffers.reserve(ModelOutput(torch.zeros(1, 11), torch.zeros(1, 3)))
    assert not buffers.rows(4).stores.any()


def chunk(slot: int, start: int, length: int) -> Chunk:
    seq = SimpleNamespace(slot=slot, token_ids=list(range(100 * slot, 100 * slot + 90)), wants_prompt_logprobs=False)
    return Chunk(seq, start, length, samples=True)
