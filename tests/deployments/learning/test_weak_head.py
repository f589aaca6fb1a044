"""A head that drafts hardly anything right may begin to learn: it does not end the start, and changes no text."""

import shutil
import time

import pytest

from tests.runtime.adaptive.losing_policy import know_costs
from tests.runtime.fitted_pair import fitted_pair
from tests.runtime.learning.test_head_swap import changed
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.folder import ledger_of
from wingbeat.deployments.replica.engine.build import build_setup
from wingbeat.runtime.adaptive.curves import PassCurve
from wingbeat.runtime.engine_checks.self_test import BadDrafterError
from wingbeat.runtime.scheduling.request import Request, SamplingParams

PROMPT, TOKENS = (5, 6, 7, 8, 9), 60
TAKEN_S = 60.0


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """A verifier, a head that is noise, and one that suits."""
    folder = tmp_path_factory.mktemp("weak")
    verifier, fitted = fitted_pair(folder)
    return verifier, changed(fitted, folder / "noise", scale=5.0), fitted


def started(weak, tmp_path, **fields):
    """An engine with its drafter, as at a start; raises as its self-test does."""
    model, drafter, _ = weak
    learn = {"dir": tmp_path / "learning"} | fields.pop("learn", {})
    limits = {"max_num_seqs": 2, "max_model_len": 128, "num_kv_blocks": 40, "threads": 1, "dtype": "float32"}
    config = AppConfig(model=model, drafter=str(drafter), drafter_place="engine", learn=learn, **limits | fields)
    setup = build_setup(config, lambda terms: None)
    setup.take_drafter_in(InProcessChannel)
    return setup.engine, setup.check_drafter(setup.engine), ledger_of(config)


def written(engine):
    engine.add_request(Request("0", PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)))
    tokens = []
    while engine.has_unfinished_requests():
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


def test_a_weak_head_that_learns_starts_hardly_drafts_and_gives_way_to_a_better_one(
    weak, tmp_path, caplog, monkeypatch
):
    know_costs(monkeypatch, PassCurve((1, 4, 16), (1e-3, 2e-3, 4e-3)))
    engine, test, ledger = started(weak, tmp_path)
    assert not test.passed
    assert "serving with it anyway" in caplog.text
    tokens = written(engine)
    decisions = engine.stats().policy.decisions
    assert decisions.get("plain", 0) > decisions.get("speculate", 0), decisions
    number = ledger.add(
        lambda into: shutil.copytree(weak[2], into, dirs_exist_ok=True), "learner", "better", serve=True
    )
    limit = time.monotonic() + TAKEN_S
    while engine.stats().head_version != number:
        assert time.monotonic() < limit, "plain rounds never show the drafter another version"
        assert written(engine) == tokens
    engine.detach_drafter()
    assert written(engine) == tokens


@pytest.mark.parametrize(
    "fields", [{"learn": {"trains": False}}, {"adaptive": False}], ids=["does not train", "drafts in every round"]
)
def test_a_weak_head_ends_the_start_where_it_would_stay_weak_or_draft_in_every_round(weak, tmp_path, fields):
    with pytest.raises(BadDrafterError, match="does not suit"):
        started(weak, tmp_path, **fields)
