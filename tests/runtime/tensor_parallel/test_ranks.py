"""A verifier over two processes writes what it writes in one."""

import signal
from dataclasses import replace

import pytest
import torch

from tests.needs import needs
from tests.runtime.models import (
    CHAIN,
    PROMPT_LENS,
    TREE,
    Run,
    eagle_drafter,
    engine_config,
    generate,
    greedy,
    greedy_params,
    random_model,
    random_prompts,
)
from tests.runtime.scripted import ScriptedDrafter, right_chain, right_tree
from tests.runtime.tensor_parallel.recorded_ranks import RecordedRank
from tests.runtime.tensor_parallel.two_ranks import DEVICE, led_engine, led_model
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.tensor_parallel import ranks
from wingbeat.runtime.tensor_parallel.follower import follow
from wingbeat.runtime.tensor_parallel.group import RankGroup
from wingbeat.runtime.verifier.loading.loader import prepare_model
from wingbeat.runtime.verifier.model import VerifierModel
from wingbeat.runtime.verifier_errors import BackendLost

LENGTH = 32
EVEN = {"vocab_size": 96}
PROMPTS = random_prompts(PROMPT_LENS, 96)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "mistral"])
def test_greedy_text_is_that_of_generate(name, second, tmp_path):
    model = random_model(name, **EVEN)
    expected, gap = greedy(model, PROMPTS, LENGTH)
    assert gap > 1e-4
    with led_model(second, model, tmp_path, engine_config()) as led:
        assert led.loaded.layers[0].num_kv_heads == 1
        assert Run(led_engine(led, led.limits), PROMPTS, greedy_params(LENGTH)).finish() == expected


def test_a_tied_output_matrix_is_divided_with_its_embedding(second, tmp_path):
    model = random_model("llama", **EVEN, tie_word_embeddings=True)
    expected, _ = greedy(model, PROMPTS[:3], LENGTH)
    with led_model(second, model, tmp_path, engine_config()) as led:
        head, embedding = led.loaded.model.get_output_embeddings(), led.loaded.model.get_input_embeddings()
        assert head.weight is embedding.weight
        assert Run(led_engine(led, led.limits), PROMPTS[:3], greedy_params(LENGTH)).finish() == expected


@pytest.mark.slow
def test_half_precision_is_tried_on_all_ranks(second, tmp_path):
    """Each rank widens its own parts; references and verdicts are those of all of them."""
    with led_model(second, random_model("qwen3", **EVEN).to(torch.bfloat16), tmp_path, engine_config()) as led:
        assert led.loaded.dtype == torch.bfloat16
        written = Run(led_engine(led, led.limits), PROMPTS[:3], greedy_params(4)).finish()
        assert [len(tokens) for tokens in written] == [4, 4, 4]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize(("speculation", "plan"), [(TREE, right_tree), (CHAIN, right_chain)], ids=["tree", "chain"])
def test_drafts_cached_prefixes_and_preemption_change_no_token(
    speculation, plan, temperature, captured, second, tmp_path
):
    model = random_model("llama", **EVEN)
    params = [SamplingParams(LENGTH, temperature, seed=seed, ignore_eos=True) for seed in range(len(PROMPTS))]
    alone = prepare_model(random_model("llama", **EVEN), "llama")
    expected, _ = generate(alone, engine_config(), None, PROMPTS, params)
    told = [prompt + more for prompt, more in zip(PROMPTS, expected, strict=True)]
    config = engine_config(speculation, max_model_len=128, num_kv_blocks=12)
    with led_model(second, model, tmp_path, config, graph_device=RecordedRank()) as led:
        for drafter in (eagle_drafter(alone, speculation), ScriptedDrafter(told, plan, 96)):
            engine = led_engine(led, led.limits, drafter, RecordedRank() if captured else None)
            assert Run(engine, PROMPTS, params).finish() == expected
            assert engine.stats().num_preemptions > 0
            again = Run(engine, PROMPTS[4:5], params[4:5])
            assert again.finish() == expected[4:5]
            assert again.last[0].num_cached_tokens > 0
            assert engine.speculation.num_drafts > 0
            engine.model.remove_taps()
    assert engine.speculation.acceptance_length > 3  # by the second drafter: accepted paths have moved in the pool


@needs("adaptive")
@pytest.mark.slow
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_costs_are_measured_on_all_ranks_and_change_no_token(captured, second, tmp_path):
    shape = replace(TREE, adaptive=True)
    alone = prepare_model(random_model("llama", **EVEN), "llama")
    expected, _ = generate(alone, engine_config(), None, PROMPTS, greedy_params(LENGTH))
    model = random_model("llama", **EVEN)
    with led_model(second, model, tmp_path, engine_config(shape), graph_device=RecordedRank()) as led:
        engine = led_engine(led, led.limits, eagle_drafter(alone, shape), RecordedRank() if captured else None)
        assert Run(engine, PROMPTS, greedy_params(LENGTH)).finish() == expected
        assert sum(engine.stats().policy.decisions.values()) > 0


def test_whole_sequences_are_observed_on_all_ranks(second, tmp_path):
    model, token_ids = random_model("llama", **EVEN), torch.tensor(PROMPTS[2])[None]
    alone = VerifierModel(prepare_model(random_model("llama", **EVEN), "llama"), (1, 3))
    with led_model(second, model, tmp_path, engine_config()) as led:
        taps = VerifierModel(led.loaded, (1, 3)).observe(token_ids)
    torch.testing.assert_close(taps, alone.observe(token_ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_an_engine_ends_with_its_rank_and_suspects_no_request(how, second, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "COLLECTIVE_S", 2.0)
    with led_model(second, random_model("llama", **EVEN), tmp_path, engine_config(), ends=False) as led:
        run = Run(led_engine(led, led.limits), PROMPTS, greedy_params(LENGTH))
        run.step()
        second.kill(how)
        with pytest.raises(RoundFailed, match="rank 0 of 2 has lost another rank") as failure:
            run.finish()
        assert failure.value.suspects == ()
        second.kill()
        led.backend.ranks.close()


@pytest.mark.slow
def test_a_rank_that_does_not_listen_is_not_waited_for(second, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "COLLECTIVE_S", 2.0)
    with led_model(second, random_model("llama", **EVEN), tmp_path, engine_config(), ends=False) as led:
        second.kill(signal.SIGSTOP)
        tell, numbers = led.backend.ranks.tell, torch.zeros(8, dtype=torch.uint8)
        with pytest.raises(BackendLost, match="rank 0 of 2 has lost another rank"):
            [tell(b"round", numbers) for _ in range(3)]  # it listens for the first one, if it was quick
        second.kill()
        led.backend.ranks.close()


@pytest.mark.slow
def test_a_rank_ends_with_rank_0(second, tmp_path):
    group = RankGroup(tmp_path / "ranks", 2)
    random_model("llama", **EVEN).save_pretrained(tmp_path)
    second.join(group, tmp_path, rank=0)
    with pytest.raises(BackendLost, match="rank 1 of 2 has lost another rank"):
        follow(group, 1, tmp_path, torch.float32, DEVICE, engine_config())
    second.kill()
