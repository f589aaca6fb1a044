"""Published acceptance lengths, and vLLM's words for them, as settings of `wingbeat bench`."""

import json
from pathlib import Path

import pytest

from tests.deployments.local.test_generate import FakeLLM, wingbeat  # noqa: F401
from tests.needs import needs
from wingbeat.deployments.bench import golden
from wingbeat.deployments.bench.golden import golden_length, published
from wingbeat.deployments.bench.options import BenchConfig
from wingbeat.deployments.cli.options import UserError, build_config
from wingbeat.runtime.config import ForcedAcceptance

TABLE = json.loads(Path(golden.__file__).with_name("data").joinpath("golden_lengths.json").read_text())


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.setenv("WINGBEAT_BENCHMARK", "0")


@pytest.mark.parametrize("name", TABLE)
def test_every_length_has_its_source_and_is_one_that_chains_can_have(name):
    for number, length in published(name).items():
        assert 1 <= length.acceptance_length <= number + 1
        assert length.head
        assert length.workload
        assert "github.com/" in length.source or "huggingface.co/" in length.source


@pytest.mark.parametrize(
    ("name", "steps", "expected"),
    [("minimax-m3", 4, 3.11), ("minimax-m3", None, 3.53), ("gpt-oss-120b", 3, 2.41), ("qwen3.8-27b-fp8", None, 2.51)],
)
def test_a_name_is_a_forced_length_of_chains(name, steps, expected, monkeypatch):
    config = build_config(BenchConfig, {"golden": name, "draft_steps": steps})
    drafted = golden_length(name, steps).num_speculative_tokens
    assert (config.draft_steps, config.draft_top_k, config.adaptive) == (drafted, 1, False)
    monkeypatch.setenv("WINGBEAT_BENCHMARK", "1")
    engine = config.engine_config(1)
    assert engine.forced_acceptance == ForcedAcceptance.length(expected)
    assert (engine.speculation.draft_steps, engine.speculation.num_nodes) == (drafted, 1 + drafted)
    for one in config.alone():
        assert one.forced_acceptance == config.forced_acceptance


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"golden": "gpt-5"}, "golden is 'gpt-5': use one of minimax-m3, "),
        ({"golden": "gpt-oss-120b", "draft_steps": 5}, "lengths are published for 3, 7"),
        ({"golden": "minimax-m3", "adaptive": True}, "golden is minimax-m3 and adaptive is True"),
        ({"golden": "minimax-m3", "draft_top_k": "4"}, "draft_top_k is 4"),
        ({"golden": "minimax-m3", "forced_acceptance": "0.5"}, "forced_acceptance is "),
        ({"golden": "minimax-m3", "drafter": "none"}, "drafter is none: nothing is drafted"),
        ({"golden": "minimax-m3", "deterministic": True}, "forced_acceptance is given and deterministic is True"),
    ],
    ids=str,
)
def test_what_contradicts_a_length_is_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        build_config(BenchConfig, given)


def test_the_length_and_its_source_are_shown(wingbeat):  # noqa: F811
    options = ("--golden", "gpt-oss-120b", "--draft-steps", "3", "--repeat", "1", "--max-tokens", "8")
    got = json.loads(wingbeat("bench", "--json", *options, llm=FakeLLM()).out)
    assert got["golden"]["acceptance_length"] == 2.41
    assert "specdrift" in got["golden"]["source"]
    assert "specdrift" in wingbeat("bench", *options, llm=FakeLLM()).out


@needs("vllm_words")
def test_vllms_words_say_the_same(monkeypatch):
    said = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.24,
    }
    config = build_config(BenchConfig, {"speculative_config": json.dumps(said)})
    assert config.drafter == ("ngram",)
    assert (config.draft_steps, config.draft_top_k, config.adaptive) == (3, 1, False)
    assert config.forced_acceptance == pytest.approx((1.0, 1.0, 0.24, 0.0))
    assert len(config.alone()) == 1
    with pytest.raises(UserError, match="must be at most 4"):
        build_config(BenchConfig, {"speculative_config": json.dumps(said | {"synthetic_acceptance_length": 4.5})})
    with pytest.raises(UserError, match="draft_steps is 5: leave one out"):
        build_config(BenchConfig, {"speculative_config": json.dumps(said), "draft_steps": 5})
