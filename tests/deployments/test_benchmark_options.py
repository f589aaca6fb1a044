"""Forced acceptance from the settings to every answer; that an engine draws by it, the engine's own tests hold."""

import asyncio

import pytest
from pydantic import ValidationError

from tests.deployments.http_world import FakePool, call
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from wingbeat.deployments.app import build
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.options.problems import SettingsError
from wingbeat.runtime.config import BENCHMARK_VARIABLE, ForcedAcceptance

HEADER = "x-wingbeat-forced-acceptance"


@pytest.fixture
def benchmarking(monkeypatch):
    monkeypatch.setenv(BENCHMARK_VARIABLE, "1")


@pytest.mark.parametrize("given", ["0.9,0.8", [0.9, 0.8], (0.9, 0.8)], ids=str)
def test_rates_reach_the_engine_as_they_were_written(benchmarking, given):
    config = AppConfig(forced_acceptance=given)
    assert config.engine_config().forced_acceptance == ForcedAcceptance((0.9, 0.8))
    assert config.answer_marks() == {"X-Wingbeat-Forced-Acceptance": "0.9,0.8"}
    assert AppConfig(forced_acceptance=0.8).engine_config().forced_acceptance == ForcedAcceptance.flat(0.8)


def test_nobody_gets_it_unasked(monkeypatch):
    monkeypatch.delenv(BENCHMARK_VARIABLE, raising=False)
    config = AppConfig()
    assert config.engine_config().forced_acceptance is None
    assert config.answer_marks() == config.environment() == {}


def test_outside_of_benchmarks_it_is_refused_by_one_line(monkeypatch):
    monkeypatch.delenv(BENCHMARK_VARIABLE, raising=False)
    with pytest.raises(SettingsError, match=r"^forced_acceptance 0.8: the text is not .*; set WINGBEAT_BENCHMARK=1$"):
        build({"forced_acceptance": "0.8"})


@pytest.mark.parametrize("given", ["0.8,", "1.1", "-0.1", "most", "nan"])
def test_rates_out_of_range_are_refused(benchmarking, given):
    with pytest.raises(ValidationError, match="forced_acceptance"):
        AppConfig(forced_acceptance=given)


def test_engines_that_draw_do_not_continue_the_text_of_others(benchmarking):
    assert AppConfig(forced_acceptance=0.8).text_identity() != AppConfig().text_identity()


def test_processes_of_an_engine_may_draw_wherever_they_start(benchmarking):
    application = build(AppConfig(forced_acceptance=0.8, device="cpu"))
    verifier = application._bound_deployment.init_args[1][0]._bound_deployment
    assert verifier.ray_actor_options["runtime_env"]["env_vars"][BENCHMARK_VARIABLE] == "1"


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 200), ("/v1/nothing", 404)])
def test_every_answer_says_so(path, status):
    body = {"model": "demo", "prompt": "hi", "max_tokens": 2}
    marked = call(FakePool(), path, body, marks={"X-Wingbeat-Forced-Acceptance": "0.8"})
    assert (marked.status_code, marked.headers[HEADER]) == (status, "0.8")
    assert HEADER not in call(FakePool(), path, body).headers


@pytest.mark.parametrize("forced", [None, ForcedAcceptance.flat(0.8)], ids=["honest", "forced"])
def test_the_metric_tells_which_engines_draw(forced):
    monitor = Engines(a=engine_stats(forced_acceptance=forced)).monitor()
    text = asyncio.run(Client(monitor).get()).text
    [line] = [line for line in text.splitlines() if line.startswith("wingbeat_forced_acceptance{")]
    assert line.endswith(" 1.0" if forced else " 0.0")
