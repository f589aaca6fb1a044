"""Pairs on CPUs get a core each, and a dead pair's core is free again."""

import multiprocessing
import os
import threading

import pytest

from wingbeat.cluster.cores import claim_core, pin_thread, waiting_env

CORES = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="a machine with one core has none to claim")


def claim_and_die(folder):
    claim_core(folder)
    os._exit(0)


@needs_two
def test_each_claim_is_another_core_and_one_is_left_over(tmp_path):
    claims = [claim_core(tmp_path) for _ in CORES]
    assert claims[-1] is None
    assert [claim.core for claim in claims[:-1]] == CORES[:0:-1]
    claims[0].release()
    assert claim_core(tmp_path).core == CORES[-1]


@needs_two
def test_a_dead_process_holds_no_core(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=claim_and_die, args=(tmp_path,))
    process.start()
    process.join()
    assert claim_core(tmp_path).core == CORES[-1]


@needs_two
def test_a_folder_that_cannot_be_made_costs_the_core_and_nothing_else(tmp_path, caplog):
    file = tmp_path / "file"
    file.touch()
    assert claim_core(file / "cores") is None
    assert "no core is claimed" in caplog.text


@needs_two
def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path, caplog):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / str(CORES[-1])).write_text("someone's file")
    (tmp_path / "cores").symlink_to("elsewhere")
    assert claim_core(tmp_path / "cores") is None
    assert "is a link or belongs to another user" in caplog.text
    assert (tmp_path / "elsewhere" / str(CORES[-1])).read_text() == "someone's file"


def test_pinning_moves_the_calling_thread_alone():
    seen = []

    def run():
        pin_thread(CORES[-1])
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [{CORES[-1]}]
    assert sorted(os.sched_getaffinity(0)) == CORES


def test_what_the_environment_says_of_openmps_threads_is_left(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    assert waiting_env()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert sorted(waiting_env()) == ["GOMP_SPINCOUNT", "KMP_BLOCKTIME"]
