"""Rounds of prompts alone are one graph each; nothing of a text changes, and nobody's keys but the prompts' own do."""

from itertools import pairwise

import pytest
import torch

from tests.runtime.models import (
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy_params,
    random_model,
    random_prompts,
    reference,
)
from tests.runtime.poisoned_graphs import PoisoningDevice
from tests.runtime.recorded_graphs import RecordingDevice
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.graphs.graph_runner import Bucket, Stage
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.prompt_graphs.prompt_rounds import PromptGraphs
from wingbeat.runtime.round.flight import RoundObserver
from wingbeat.runtime.round.prompt_chunks import PIECE_ROWS
from wingbeat.runtime.round.shapes import round_shapes
from wingbeat.runtime.scheduling.request import PromptReport, Request, SamplingParams
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

pytestmark = pytest.mark.few(1)

LENGTHS = (150, 3, 75, 33, 1, 64)


def prompts_of(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of pieces of captured rounds without decodes."""
    return round_shapes(config).prompts.prompts


class Prompts(RoundObserver):
    """Rounds of prompts alone: how many chunks, and what they leave for the drafter."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.taps: list[torch.Tensor] = []

    def launched(self, flight) -> None:
        if not flight.plan.decodes:
            self.sizes.append(len(flight.plan.chunks))
            self.taps.append(flight.chunk_taps.clone())


def run(model, device, params, **limits):
    """Prompts of several lengths, three at once, in chunks of at most 70 tokens."""
    ref, prompts = reference(model), Prompts()
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 70, "overlap": False} | limits
    engine = build_engine(
        ref.loaded, engine_config(**limits), eagle_drafter(ref.loaded, TREE), InProcessChannel, device
    )
    engine.observe(prompts)
    try:
        texts = Run(engine, random_prompts(LENGTHS), params).finish()
    finally:
        engine.model.remove_taps()
    return texts, prompts, engine


SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, top_p=0.8, seed=5, ignore_eos=True)
PENALIZED = SamplingParams(max_tokens=6, temperature=0.7, seed=3, ignore_eos=True, repetition_penalty=1.3)
PARAMS = {
    "greedy": [greedy_params(6)] * len(LENGTHS),
    "mixed": [greedy_params(6), SAMPLED, PENALIZED, SAMPLED, greedy_params(4), PENALIZED],
}


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_captured_prompts_lead_to_the_texts_of_a_host(model, params, overlap):
    """Also to the hidden states that a drafter reads, which are those of the host's pass and of an eager one's."""
    on_host, there, _ = run(model, None, params)
    device = PoisoningDevice(RecordingDevice())
    texts, captured, engine = run(model, device, params, overlap=overlap)
    eager_texts, eager, other = run(model, RecordingDevice(), params, overlap=overlap, cuda_graphs="decode_only")
    assert texts == eager_texts == on_host
    stats, others = engine.stats().graphs, other.stats().graphs
    assert stats.replays[Stage.BASE_PROMPTS] == len(captured.sizes) > 1
    assert max(captured.sizes) > 1
    assert Stage.BASE_PROMPTS not in stats.eager_runs
    assert others.eager_runs[Stage.BASE_PROMPTS] == len(eager.sizes)
    assert Stage.BASE_PROMPTS not in others.replays
    assert others.num_untried >= len(prompts_of(engine.config)) > 0
    assert device.num_poisoned
    if not overlap:
        for found in (captured, eager):
            assert found.sizes == there.sizes
            for taps, theirs in zip(found.taps, there.taps, strict=True):
                torch.testing.assert_close(taps, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_captured_prompts_lead_to_the_texts_of_eager_ones():
    loaded, texts = prepare_model(random_model("llama").to("cuda"), "llama"), []
    for mode in ("none", "decode_only", "full"):
        config = engine_config(max_num_seqs=3, max_num_batched_tokens=70, cuda_graphs=mode)
        engine = Engine(loaded, config)
        texts.append(Run(engine, random_prompts(LENGTHS), PARAMS["mixed"]).finish())
    assert texts[2] == texts[1] == texts[0]
    stats = engine.stats().graphs
    assert stats.failed == []
    assert stats.replays[Stage.BASE_PROMPTS] > 1
    torch.cuda.synchronize()


def test_padding_changes_no_key_of_anybody():
    """Every number in the pool but the prompts' own blocks, and block 0 which is nobody's, stays as it was."""
    ref = reference("llama")
    config = engine_config(max_num_seqs=3, max_num_batched_tokens=128, overlap=False)
    engine = Engine(ref.loaded, config, graph_device=RecordingDevice())
    noise = torch.Generator().manual_seed(1)
    for part in (part for pair in engine.cache.layers for part in pair):
        part.normal_(generator=noise)
    before = [part.clone() for pair in engine.cache.layers for part in pair]
    prompts = random_prompts((35, 5))
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(str(number), prompt, greedy_params(2)))
    engine.step()
    assert engine.stats().graphs.replays == {Stage.BASE_PROMPTS: 1}
    changed = torch.zeros(engine.cache.num_blocks, config.block_size, dtype=torch.bool)
    for old, new in zip(before, (part for pair in engine.cache.layers for part in pair), strict=True):
        changed |= (old != new).flatten(2).any(dim=2)
    assert int(changed[1:].sum()) == sum(map(len, prompts)), "a row for each token, and no other"


def test_a_round_of_prompts_runs_the_model_once_and_in_no_pass_of_its_own_where_it_is_captured(monkeypatch):
    passes, forward = [], VerifierModel.forward

    def counted(model, batch):
        passes.append(batch.token_ids.shape[1])
        return forward(model, batch)

    ref = reference("llama")
    engine = Engine(
        ref.loaded, engine_config(max_num_seqs=2, max_num_batched_tokens=128), graph_device=RecordingDevice()
    )
    monkeypatch.setattr(VerifierModel, "forward", counted)
    for paused, rows in ((False, []), (True, [4 * PIECE_ROWS])):
        engine.runner.graphs.pool.paused = paused
        engine.add_request(Request(str(paused), random_prompts((50,))[0], greedy_params(1)))
        while engine.has_unfinished_requests():
            engine.step()
        assert passes == rows
    assert engine.stats().graphs.eager_runs == {Stage.BASE_PROMPTS: 1}


class Nothing(PromptReport):
    """Looks at all of a prompt."""

    is_of_all = True

    def made_of(self, rows, num_prompt_tokens):
        return b""


@pytest.mark.parametrize("why", ["log-probabilities", "reported", "long"])
def test_what_no_graph_holds_is_eager(why, monkeypatch):
    if why == "long":
        monkeypatch.setattr("wingbeat.runtime.prompt_graphs.prompt_shapes._PROMPTS", (1,))
    ref, prompt = reference("llama"), random_prompts((40,))[0]
    asked = {"log-probabilities": {"prompt_logprobs": 1}, "reported": {"report": Nothing()}, "long": {}}[why]
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, **asked)
    engine = Engine(ref.loaded, engine_config(max_num_batched_tokens=64), graph_device=RecordingDevice())
    engine.add_request(Request("one", prompt, params))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.stats().graphs.eager_runs == {Stage.BASE_PROMPTS: 1}
    assert Stage.BASE_PROMPTS not in engine.stats().graphs.replays


@pytest.mark.slow
def test_a_capture_that_failed_is_named_and_its_prompts_run_eagerly(monkeypatch, caplog):
    """A smaller one is not tried: what spoils one capture of a model spoils them all."""
    stage = PromptGraphs._stage

    def looking(graphs, *args):
        compute = stage(graphs, *args)

        def computed(inputs):
            output = compute(inputs)
            assert graphs._buffers._results.logits.sum().item() < float("inf")
            return output

        return computed

    monkeypatch.setattr(PromptGraphs, "_stage", looking)
    expected, _, _ = run("llama", None, PARAMS["greedy"])
    texts, rounds, engine = run("llama", RecordingDevice(), PARAMS["greedy"], max_num_batched_tokens=256)
    stats = engine.stats().graphs
    assert texts == expected
    [failure] = [failure for failure in stats.failed if failure.stage == Stage.BASE_PROMPTS]
    assert failure.bucket == Bucket(prompts_of(engine.config)[-1], PIECE_ROWS)
    assert "not permitted when stream is capturing" in failure.reason
    assert f"CUDA graph of base_prompts, bucket {failure.bucket}, was not captured" in caplog.text
    assert Stage.BASE_PROMPTS not in {stage for stage, _ in stats.captured}
    assert stats.num_untried >= len(prompts_of(engine.config)) - 1
    assert stats.eager_runs == {Stage.BASE_PROMPTS: len(rounds.sizes)}
    assert stats.counts()["failed"] == len(stats.failed)


@pytest.mark.parametrize(
    ("limits", "pieces"),
    [
        ({}, (4, 8, 12, 16, 24, 32)),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 8}, (4, 8, 12, 16, 23)),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 1}, (1,)),
        ({"cuda_graphs": "decode_only"}, ()),
    ],
)
def test_graphs_are_as_many_as_there_are_prompts_of_a_round_and_few(limits, pieces):
    assert prompts_of(EngineConfig(**{"max_num_batched_tokens": 2048, "max_num_seqs": 64} | limits)) == pieces


def test_above_what_is_free_less_than_a_third_is_padding():
    pieces = prompts_of(EngineConfig(max_num_batched_tokens=4096, max_num_seqs=64))
    free = 384 // PIECE_ROWS
    for smaller, bucket in pairwise(pieces):
        assert bucket <= free or (bucket - smaller - 1) * 3 < bucket
