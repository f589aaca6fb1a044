"""Alerting rules use exported metrics, name their runbook, and fire for their faults and for no others."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.deployments.http_world import FakePool
from tests.deployments.metrics.alert_rules import FILE, MINUTES, PROMTOOL, check_firing, promtool, rules
from tests.deployments.metrics.engine_figures import Client, Engines, engine_stats
from tests.optional import is_gone
from wingbeat.deployments.metrics.exposition import SnapshotCollector
from wingbeat.deployments.metrics.wingbeat_families import DRAFTER_STATES
from wingbeat.runtime.engine.round_counts import NoTree
from wingbeat.runtime.engine.speculation import Reason

ROOT = Path(__file__).parents[3]
SELECTOR = re.compile(r"\b((?:vllm:|wingbeat_)\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
GROUPED = re.compile(r"by \(([^)]*)\)")
VALUES = {
    "state": DRAFTER_STATES,
    "reason": (*NoTree, *Reason),
    "decision": ("promoted", "rejected", "rolled_back", "refused"),
    "status": ("5..",),
}
"""Possible values of labels."""
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")


@pytest.fixture(scope="module")
def labels() -> dict[str, set[str]]:
    """Labels by name, as one scrape shows them."""

    async def scenario() -> dict[str, set[str]]:
        monitor = Engines(a=engine_stats()).monitor()
        await Client(monitor, FakePool(engine_id="a")).complete()
        shown: dict[str, set[str]] = {}
        for family in SnapshotCollector(await monitor.fleets[0].snapshot()).collect():
            for sample in family.samples:
                shown.setdefault(sample.name, set()).update(sample.labels)
        return shown

    return asyncio.run(scenario())


def test_rules_ask_for_names_labels_and_values_that_are_exported(labels):
    num_selectors = 0
    for rule in rules():
        names = [(name, matchers) for name, matchers in SELECTOR.findall(rule["expr"]) if not is_gone(name)]
        for name, matchers in names:
            num_selectors += 1
            assert name in labels
            for label, values in MATCHER.findall(matchers):
                assert label in labels[name]
                assert set(values.split("|")) <= set(VALUES[label])
        grouped = {label for group in GROUPED.findall(rule["expr"]) for label in group.split(", ")}
        shown = set().union(*(labels[name] for name, _ in names)) if names else grouped
        assert grouped <= shown
    assert num_selectors > 8


def test_every_rule_has_what_people_are_told_and_a_section_of_the_runbook():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    sections = re.findall(r"^#### (Wingbeat\w+)\n\n- Means: .*?^- Look at: .*?^- Do: ", text, re.M | re.S)
    found = rules()
    assert [rule["alert"] for rule in found] == sections
    for rule in found:
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_durations_are_minutes():
    times = [rule["for"] for rule in rules() if "for" in rule]
    windows = [window for rule in rules() for window in re.findall(r"\[([^]]*)\]", rule["expr"])]
    times += [part for window in windows for part in window.split(":")]
    assert len(times) > 15
    assert [time for time in times if not MINUTES.fullmatch(time)] == []


HEALTHY = {
    "vllm:spec_decode_num_accepted_tokens_total{E}": "0+180x90",
    "vllm:spec_decode_num_drafts_total{E}": "0+60x90",
    "wingbeat_break_even_acceptance_length{E}": "1.75+0x90",
    "wingbeat_tree_config_info{E,adaptive='True'}": "1+0x90",
    "wingbeat_self_test_passed{E}": "1+0x90",
    "wingbeat_drafter_state{E,state='attached'}": "1+0x20 0 1+0x70",
    "wingbeat_drafter_state{E,state='lost'}": "0+0x20 1 0+0x70",
    "wingbeat_plain_rounds_total{E,reason='plain'}": "0+40x90",
    "wingbeat_plain_rounds_total{E,reason='not_asked'}": "0+50x90",
    "wingbeat_rounds_total{E}": "0+100x90",
    "vllm:kv_cache_usage_perc{E}": "0.9+0x20 1 1 0.9+0x70",
    "vllm:num_preemptions_total{E}": "3+0x90",
    "vllm:num_requests_waiting{E}": "0+0x20 0+1x6 6-1x6 0+0x60",
    "wingbeat_router_answers_total{router='r',status='200'}": "0+1000x90",
    "wingbeat_router_answers_total{router='r',status='503'}": "0+1x90",
    "wingbeat_engine_restarts_total{E}": "1+0x90",
    "wingbeat_engine_up{E}": "1+0x90",
    "wingbeat_head_decisions_total{E,decision='rolled_back'}": "2+0x90",
    "wingbeat_head_decisions_total{E,decision='promoted'}": "0+1x90",
}
"""Values by minute; E stands for the labels of an engine."""
GONE = "_x90"
FAULTS = {
    "acceptance": ("WingbeatAcceptanceBelowBreakEven", {"vllm:spec_decode_num_accepted_tokens_total{E}": "0+30x90"}),
    "break-even": ("WingbeatAcceptanceBelowBreakEven", {"wingbeat_break_even_acceptance_length{E}": "4.5+0x90"}),
    "fixed trees": (
        "WingbeatAcceptanceBelowBreakEven",
        {
            "vllm:spec_decode_num_accepted_tokens_total{E}": "0+20x90",
            "wingbeat_break_even_acceptance_length{E}": GONE,
            "wingbeat_tree_config_info{E,adaptive='True'}": GONE,
            "wingbeat_tree_config_info{E,adaptive='False'}": "1+0x90",
        },
    ),
    "costs that could not be measured": (
        "WingbeatAcceptanceBelowBreakEven",
        {
            "vllm:spec_decode_num_accepted_tokens_total{E}": "0+20x90",
            "wingbeat_break_even_acceptance_length{E}": GONE,
        },
    ),
    "self-test": ("WingbeatSelfTestFailing", {"wingbeat_self_test_passed{E}": "0+0x90"}),
    "drafter": ("WingbeatDrafterAbsent", {"wingbeat_drafter_state{E,state='lost'}": "1+0x90"}),
    "plain rounds": ("WingbeatPlainRounds", {"wingbeat_plain_rounds_total{E,reason='plain'}": "0+60x90"}),
    "plain rounds of two reasons": (
        "WingbeatPlainRounds",
        {"wingbeat_plain_rounds_total{E,reason='not_usable'}": "0+30x90"},
    ),
    "KV": ("WingbeatKVFull", {"vllm:kv_cache_usage_perc{E}": "0.97+0x90"}),
    "preemptions": ("WingbeatKVFull", {"vllm:num_preemptions_total{E}": "3+1x90"}),
    "queue": ("WingbeatQueueGrowing", {"vllm:num_requests_waiting{E}": "0+1x90"}),
    "queue of one of two engines": (
        "WingbeatQueueGrowing",
        {"vllm:num_requests_waiting{F}": "0+2x90", "vllm:num_requests_waiting{E}": "90-1x90"},
    ),
    "answers": ("WingbeatServerErrors", {"wingbeat_router_answers_total{router='r',status='500'}": "0+20x90"}),
    "answers of one of two routers": (
        "WingbeatServerErrors",
        {"wingbeat_router_answers_total{router='s',status='502'}": "0+20x90"},
    ),
    "engine": ("WingbeatReplicaRestarting", {"wingbeat_engine_restarts_total{E}": "0+0x35 1+0x50"}),
    "replica": (
        "WingbeatReplicaRestarting",
        {"wingbeat_engine_up{E}": "1+0x35 stale", "wingbeat_engine_up{F}": "_x36 1+0x50"},
    ),
    "silent": ("WingbeatReplicaRestarting", {"wingbeat_engine_up{F}": "0+0x90"}),
    "head": ("WingbeatHeadRolledBack", {"wingbeat_head_decisions_total{E,decision='rolled_back'}": "0+0x10 1+0x80"}),
}
STILL_HEALTHY = {
    "as it is": {},
    "fixed trees": {
        "wingbeat_break_even_acceptance_length{E}": GONE,
        "wingbeat_tree_config_info{E,adaptive='False'}": "1+0x90",
    },
    "idle": {
        "vllm:spec_decode_num_accepted_tokens_total{E}": "9+0x90",
        "vllm:spec_decode_num_drafts_total{E}": "9+0x90",
        "wingbeat_rounds_total{E}": "9+0x90",
        "wingbeat_plain_rounds_total{E,reason='plain'}": "9+0x90",
        "wingbeat_router_answers_total{router='r',status='200'}": "9+0x90",
        "wingbeat_router_answers_total{router='r',status='503'}": "9+0x90",
    },
    "no drafter": {
        "wingbeat_plain_rounds_total{E,reason='plain'}": "0+0x90",
        "wingbeat_plain_rounds_total{E,reason='no_drafter'}": "0+100x90",
        "wingbeat_drafter_state{E,state='none'}": "1+0x90",
        "wingbeat_self_test_passed{E}": GONE,
        "vllm:spec_decode_num_drafts_total{E}": GONE,
    },
    "one replica more": {"wingbeat_engine_up{F}": "_x30 1+0x50"},
    "one replica less": {"wingbeat_engine_up{F}": "1+0x30 stale"},
    "a queue that stands": {"vllm:num_requests_waiting{E}": "9+0x90"},
    "two routers are scraped": {
        "wingbeat_plain_rounds_total{E,reason='plain',instance='two'}": "0+40x90",
        "wingbeat_rounds_total{E,instance='two'}": "0+100x90",
        "vllm:num_requests_waiting{E,instance='two'}": "0+0x90",
        "wingbeat_engine_up{E,instance='two'}": "1+0x90",
    },
}
TIMES = ("20m", "32m", "40m", "50m")


def spelt(series: dict[str, str]) -> dict[str, str]:
    """Beside the healthy ones, with the labels of engines."""
    whole = {"E": "model_name='m',engine='e'", "F": "model_name='m',engine='f'"}
    given = HEALTHY | series
    return {re.sub(r"\b[EF]\b", lambda found: whole[found[0]], name): values for name, values in given.items()}


@needs_promtool
def test_promtool_reads_the_rules():
    promtool("check", "rules", FILE)


@needs_promtool
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fires_its_alert_and_no_other(name, tmp_path):
    alert, series = FAULTS[name]
    check_firing(spelt(series), "42m", [alert], tmp_path)


def test_every_alert_has_a_fault():
    assert {alert for alert, _ in FAULTS.values()} == {rule["alert"] for rule in rules()}


@needs_promtool
@pytest.mark.parametrize("name", STILL_HEALTHY)
def test_nothing_fires_over_what_is_healthy(name, tmp_path):
    for at in TIMES:
        check_firing(spelt(STILL_HEALTHY[name]), at, [], tmp_path)
