"""Rounds that two ranks have captured write what they write eagerly, which is what one process writes."""

import logging
import signal

import pytest

from tests.runtime.models import (
    CHAIN,
    PROMPT_LENS,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    greedy,
    greedy_params,
    noisy,
    random_model,
    random_prompts,
)
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from tests.runtime.tensor_parallel.recorded_ranks import OPS, RecordedRank
from tests.runtime.tensor_parallel.two_ranks import led_engine, led_model
from wingbeat.kernels.layer import reference
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.engine_checks.graph_check import check_graphs
from wingbeat.runtime.fused import layers as fused
from wingbeat.runtime.fused.layers import FusedLayer
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.tensor_parallel import ranks
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier_errors import BackendLost

LENGTH = 24
COUNTS = (LENGTH, LENGTH - 10, LENGTH)
"""Numbers of tokens to generate: a prompt arrives while another request decodes."""
EVEN = {"vocab_size": 96}
PROMPTS = random_prompts(PROMPT_LENS, 96)[:3]
PARAMS = [greedy_params(count) for count in COUNTS]
LIMITS = engine_config(max_num_seqs=2)


def expected_of(model):
    """Text of each prompt by transformers' generate()."""
    return [text[:count] for text, count in zip(greedy(model, PROMPTS, LENGTH)[0], COUNTS, strict=True)]


def drafter_of(kind, texts):
    """By name; None drafts nothing."""
    if kind == "EAGLE tree":
        return eagle_drafter(prepare_model(random_model("llama", **EVEN), "llama"), TREE)
    plan = {"right chain": right_chain, "right tree": right_tree}.get(kind)
    told = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    return None if plan is None else ScriptedDrafter(told, plan, 96)


@pytest.mark.parametrize("kind", ["plain", "right chain", "right tree", "EAGLE tree"])
def test_captured_text_is_eager_text_is_that_of_one_process(kind, second, tmp_path):
    model = random_model("llama", **EVEN)
    expected = expected_of(model)
    limits = engine_config(CHAIN if kind == "right chain" else TREE, max_num_seqs=2)
    with led_model(second, model, tmp_path, limits, graph_device=RecordedRank()) as led:
        for graph_device in (None, RecordedRank()):
            engine = led_engine(led, led.limits, drafter_of(kind, expected), graph_device)
            assert Run(engine, PROMPTS, PARAMS).finish() == expected
            engine.model.remove_taps()
    stats = engine.stats()
    assert stats.graphs.replays[Stage.BASE_DECODING if kind == "plain" else Stage.BASE_VERIFICATION] > 3
    assert stats.graphs.replays[Stage.BASE_MIXED]
    assert stats.graphs.replays[Stage.BASE_PROMPTS]
    assert not stats.graphs.eager_runs
    assert not kind.startswith("right") or stats.speculation.acceptance_length > 3, "accepted paths move in the pool"


def test_the_check_of_a_start_holds_replays_against_eager_rounds_of_all_ranks(second, tmp_path):
    with led_model(second, random_model("llama", **EVEN), tmp_path, LIMITS, graph_device=RecordedRank()) as led:
        device = RecordedRank()
        assert check_graphs(led_engine(led, led.limits, None, device), None) is None
        assert device.num_replays > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_fused_layers_of_ranks_write_the_same_text(name, second, tmp_path, monkeypatch):
    monkeypatch.setattr(fused, "OPS", {"cpu": OPS})
    biased = {"attention_bias": True, "mlp_bias": True} if name == "llama" else {}
    model = noisy(name, **EVEN, **biased)
    expected = expected_of(model)
    with led_model(second, model, tmp_path, LIMITS, graph_device=RecordedRank()) as led:
        assert all(isinstance(layer, FusedLayer) for layer in led.loaded.decoder_layers)
        engine = led_engine(led, led.limits, drafter_of("right tree", expected), RecordedRank())
        assert Run(engine, PROMPTS, PARAMS).finish() == expected
    assert not engine.stats().graphs.eager_runs


def wrong_silu_mul(gate_up):
    """`silu_mul` with a wrong result, as from a faulty device."""
    return reference.silu_mul(gate_up) * 1.1


@pytest.mark.parametrize("wrong", [0, 1], ids=["rank 0", "rank 1"])
def test_layers_are_fused_on_all_ranks_or_none(wrong, second, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    steps = [{"cpu": OPS._replace(silu_mul=wrong_silu_mul) if rank == wrong else OPS} for rank in (0, 1)]
    monkeypatch.setattr(fused, "OPS", steps[0])
    model = random_model("llama", **EVEN)
    expected = expected_of(model)
    with led_model(second, model, tmp_path, LIMITS, ops=steps[1]) as led:
        assert Run(led_engine(led, led.limits), PROMPTS, PARAMS).finish() == expected
    [line] = [line for line in caplog.messages if "decoder layers are fused" in line]
    assert line == "0 of 4 decoder layers are fused; 4 are not: rank 0: a trial gives other numbers"


def test_experts_of_ranks_are_captured(second, tmp_path):
    model = random_model("qwen3_moe", **EVEN)
    expected = expected_of(model)
    with led_model(second, model, tmp_path, LIMITS, graph_device=RecordedRank()) as led:
        engine = led_engine(led, led.limits, None, RecordedRank())
        assert Run(engine, PROMPTS, PARAMS).finish() == expected
    assert engine.stats().graphs.replays[Stage.BASE_DECODING] > 3
    assert not engine.stats().graphs.eager_runs


@pytest.mark.parametrize("fails", [0, 1], ids=["rank 0", "rank 1"])
def test_a_capture_that_fails_on_one_rank_is_said_and_runs_eagerly_on_all(fails, second, tmp_path, caplog):
    """The second one, of a mixed round: the first, of prompts, and all others are captured."""
    model = random_model("llama", **EVEN)
    expected = expected_of(model)
    devices = [RecordedRank(fails=2 if rank == fails else 0) for rank in (0, 1)]
    limits = engine_config(max_num_seqs=2)
    with led_model(second, model, tmp_path, limits, graph_device=devices[1]) as led:
        engine = led_engine(led, led.limits, None, devices[0])
        assert Run(engine, PROMPTS, PARAMS).finish() == expected
    [line] = [line for line in caplog.messages if "item is not permitted" in line]
    assert line.startswith("CUDA graph of base_mixed, bucket 2x1+64, was not captured and runs eagerly: RuntimeError: ")
    assert f"rank {fails}: " in line
    assert engine.stats().graphs.replays[Stage.BASE_DECODING] > 3


def test_a_rank_that_dies_in_a_capture_ends_the_start(second, tmp_path):
    with led_model(
        second, random_model("llama", **EVEN), tmp_path, LIMITS, ends=False, graph_device=RecordedRank(dies=2)
    ) as led:
        with pytest.raises(BackendLost, match="rank 0 of 2 has lost another rank"):
            led_engine(led, led.limits, None, RecordedRank())
        second.kill()
        led.backend.ranks.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_engine_ends_with_a_rank_whose_graphs_it_needs(how, second, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "COLLECTIVE_S", 2.0)
    with led_model(
        second, random_model("llama", **EVEN), tmp_path, LIMITS, ends=False, graph_device=RecordedRank()
    ) as led:
        run = Run(led_engine(led, led.limits, None, RecordedRank()), PROMPTS, PARAMS)
        for _ in range(4):
            run.step()
        assert run.engine.stats().graphs.replays[Stage.BASE_DECODING]
        second.kill(how)
        with pytest.raises(RoundFailed, match="rank 0 of 2 has lost another rank") as failure:
            run.finish()
        assert failure.value.suspects == ()
        second.kill()
        led.backend.ranks.close()
