"""Alerting rules over the demo pair: a real Prometheus fires each over its fault, none over an hour of healthy load.

Minutes are read as seconds. `test_learning.py` has the roll-back of a head.
"""

import os
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.deployments.metrics.prometheus_server import BINARY
from tests.e2e.watched_app import watched
from tests.runtime.models import DEMO_PAIR

pytestmark = [
    *(pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")),
    pytest.mark.skipif(BINARY is None, reason="prometheus is not installed: apt-get install prometheus"),
]
HOUR_S = 60.0
FILE = "model.safetensors"


def kill(pid: int) -> int:
    """End a process of the application; its id."""
    assert pid > 0
    os.kill(pid, signal.SIGKILL)
    return pid


def test_an_hour_of_healthy_load_fires_nothing_and_dead_processes_their_alerts(start_app, tmp_path):
    # Fixed trees: on a machine busy with tests the policy may well find that drafts for so small a model do not pay.
    with watched(start_app, "alerts-fine", tmp_path, {"max_tokens": 64}, adaptive=False) as world:
        world.ask(3)
        time.sleep(HOUR_S)
        print(world.said())
        assert world.fired() == set()
        assert world.num_errors == 0
        killed = set()

        def kill_drafters_until_it_fires() -> bool:
            """Kill drafters in turn, so that each is awaited for longer than the one before."""
            stats = world.app.engine()
            if stats["drafter_state"] == "attached" and stats["drafter_pid"] not in killed:
                killed.add(kill(stats["drafter_pid"]))
            return {"WingbeatDrafterAbsent", "WingbeatPlainRounds"} <= world.fired()

        world.until(kill_drafters_until_it_fires)
        assert "WingbeatReplicaRestarting" not in world.fired()
        kill(world.app.engine()["engine_pid"])
        world.wait_for("WingbeatReplicaRestarting")
        assert "WingbeatSelfTestFailing" not in world.fired()


def test_a_head_that_drafts_nothing_right_fires_what_is_about_it(start_app, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(DEMO_PAIR / "drafter", bad)
    torch.manual_seed(5)
    weights = {
        name: torch.randn_like(one) if one.is_floating_point() else one for name, one in load_file(bad / FILE).items()
    }
    save_file(weights, bad / FILE)
    settings = {"drafter": str(bad), "allow_bad_drafter": True}
    with watched(start_app, "alerts-head", tmp_path, {"max_tokens": 64}, **settings) as world:
        world.ask(3)
        about_it = {"WingbeatSelfTestFailing", "WingbeatAcceptanceBelowBreakEven"}
        world.wait_for(*about_it)
        print(world.said())
        assert world.fired() - {"WingbeatPlainRounds"} == about_it


def test_more_requests_than_there_is_room_for_fire_what_is_about_load(start_app, tmp_path):
    limits = {"max_num_seqs": 2, "max_model_len": 256, "num_kv_blocks": 24, "max_queued_requests": 24}
    with watched(start_app, "alerts-load", tmp_path, {"max_tokens": 200}, adaptive=False, **limits) as world:
        about_load = {"WingbeatKVFull", "WingbeatQueueGrowing", "WingbeatServerErrors"}

        def ask_more_until_all_fire() -> bool:
            world.ask(1)
            return about_load <= world.fired()

        world.until(ask_more_until_all_fire, every_s=0.6)
        assert world.num_errors > 0
        assert world.fired() == about_load
