"""`wingbeat bench`: the same prompts by plain and by speculative decoding."""

import json
import os
import re

import pytest

from tests.deployments.local.test_generate import FakeLLM, wingbeat  # noqa: F401
from tests.needs import needs
from wingbeat.deployments.bench.options import PROMPTS, BenchConfig
from wingbeat.deployments.cli.options import UserError, build_config, option_name
from wingbeat.runtime.config import SpeculationConfig


def test_both_modes_are_compared_on_the_same_prompts(wingbeat):  # noqa: F811
    llm = FakeLLM()
    got = json.loads(wingbeat("bench", "--json", "--repeat", "2", "--max-tokens", "20", llm=llm).out)
    assert (got["num_prompts"], got["num_tokens"], got["same_tokens"]) == (len(PROMPTS), 20 * len(PROMPTS), True)
    assert got["metrics"]["speculative_decoding"]["acceptance_length"] == 2.5
    modes = [params.speculation for _, params in llm.seen]
    assert modes.count(True) == modes.count(False) == 3 * len(PROMPTS)


def test_the_tables_show_ratio_and_positions(wingbeat):  # noqa: F811
    got = wingbeat("bench", "--repeat", "1", "--max-tokens", "8", "--batch-size", "3", llm=FakeLLM())
    assert got.code == 0
    assert all(word in got.out for word in ("speculative", "ratio", "2.50", "Acceptance per position", "0.500"))


def test_forced_acceptance_is_shown_and_a_benchmark_needs_no_variable(wingbeat, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WINGBEAT_BENCHMARK", "0")
    options = ("--repeat", "1", "--max-tokens", "8", "--forced-acceptance", "0.9,0.8")
    got = wingbeat("bench", *options, llm=FakeLLM())
    assert got.code == 0
    assert "not the model's" in " ".join(got.out.split())
    assert os.environ["WINGBEAT_BENCHMARK"] == "1", "engines look there"


@needs("suffix")
def test_of_several_drafters_each_is_told_its_own_settings():
    name = "suffix_decoding_max_spec_factor"
    config = build_config(BenchConfig, {"drafter": ["none", "suffix"], name: 1.5, "batch_size": [1]})
    assert [one.drafter_settings() for one in config.alone()] == [{}, {name: 1.5}]
    with pytest.raises(UserError, match=f"{name} is 1.5 and drafter is none: only drafter suffix has this setting"):
        build_config(BenchConfig, {"drafter": ["none"], name: 1.5})


def test_prompts_come_from_a_file(wingbeat, tmp_path):  # noqa: F811
    llm, path = FakeLLM(), tmp_path / "prompts.txt"
    path.write_text("alpha\n\nbeta\n")
    wingbeat("bench", "--prompts", str(path), "--repeat", "1", "--max-tokens", "4", llm=llm)
    assert {llm.tokenizer.decode(prompt) for prompt, _ in llm.seen} == {"alpha", "beta"}


@pytest.mark.parametrize("option", ["--prompts /nowhere", "--repeat 0"])
def test_a_mistake_is_one_line_and_exit_code_2(wingbeat, option):  # noqa: F811
    got = wingbeat("bench", *option.split())
    assert (got.code, got.out, got.err.count("\n")) == (2, "", 1)
    assert option.split()[1] in got.err


def test_the_model_may_stand_without_its_option(wingbeat):  # noqa: F811
    got = wingbeat("bench", "/nowhere", "--repeat", "1")
    assert (got.code, got.err.count("\n")) == (2, 1)
    assert "/nowhere" in got.err


def test_every_setting_is_shown_once(wingbeat):  # noqa: F811
    shown = re.findall(r"^  (--[\w-]+)", wingbeat("bench", "--help").out, re.M)
    assert len(shown) == len({*shown})
    assert {*map(option_name, BenchConfig.model_fields)} <= {*shown}


def test_limits_are_those_of_one_sequence():
    assert BenchConfig(device="cpu").engine_config(1).speculation == SpeculationConfig.default("cpu")
