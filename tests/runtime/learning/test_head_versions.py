"""A ledger says one thing to everybody, whoever is killed, and leads back to where it came from."""

import json
import multiprocessing
import os
import signal

import pytest

from wingbeat.runtime.learning.head_versions import (
    LEAST_ROUNDS,
    LEDGER_FILE,
    MOST_TRIES,
    MOST_UNUSED,
    Accepted,
    HeadLedger,
    LedgerError,
    fell_below,
)


@pytest.fixture
def ledger(tmp_path):
    return HeadLedger(tmp_path / "ledger", tmp_path / "configured", "model")


def added(ledger, text="weights", source="learner"):
    return ledger.add(lambda folder: (folder / "model.safetensors").write_text(text), source, "made")


def test_without_a_file_the_configured_head_is_served(ledger, tmp_path):
    assert ledger.read().served == 0
    assert ledger.folder_of(0) == tmp_path / "configured"
    assert not ledger.folder.exists(), "looking made a folder"


def test_versions_are_promoted_rolled_back_and_told_with_their_reasons(ledger):
    first, second = added(ledger), added(ledger, "others", "operator")
    assert (first, second) == (1, 2)
    ledger.promote(1, "better")
    ledger.promote(2, "asked for")
    assert (ledger.read().served, ledger.read().previous) == (2, 1)
    assert (ledger.folder_of(2) / "model.safetensors").read_text() == "others"
    assert ledger.roll_back("worse", only=1) is None
    assert ledger.roll_back("worse", only=2) == 2
    found = ledger.read()
    assert (found.served, found.previous) == (1, 0)
    assert found.counts == {"promoted": 2, "rolled_back": 1}
    assert [(d.number, d.what, d.served, d.reason) for d in found.decisions][-1] == (2, "rolled_back", 1, "worse")
    assert found.version(2).state == "rolled_back"
    ledger.roll_back("by hand")
    assert ledger.read().served == 0
    with pytest.raises(LedgerError, match="no version before"):
        ledger.roll_back("again")


def test_a_refused_version_gives_way_and_is_never_promoted_again(ledger):
    added(ledger)
    ledger.promote(1, "asked for")
    ledger.refuse(1, "its numbers are not finite")
    ledger.refuse(1, "seen by another drafter")
    found = ledger.read()
    assert found.served == 0
    assert found.counts == {"promoted": 1, "refused": 1}
    with pytest.raises(LedgerError, match="not finite"):
        ledger.promote(1, "again")
    with pytest.raises(LedgerError, match="no version 7"):
        ledger.promote(7, "unknown")


def test_a_version_that_ends_every_drafter_is_refused(ledger):
    for number in (added(ledger), added(ledger)):
        ledger.promote(number, "better")
    assert all(ledger.begin(2) for _ in range(MOST_TRIES))
    assert not ledger.begin(2)
    found = ledger.read()
    assert (found.served, found.version(2).state) == (1, "refused")
    ledger.took(1)
    assert all(ledger.begin(1) for _ in range(MOST_TRIES + 1)), "one that was read once is no such version"


def test_a_version_whose_files_cannot_be_written_leaves_nothing(ledger):
    def fails(folder):
        (folder / "part").write_text("x")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        ledger.add(fails, "learner", "")
    assert list((ledger.folder / "heads").iterdir()) == []
    assert added(ledger) == 1


def test_folders_of_versions_that_nobody_goes_back_to_are_removed(ledger):
    added(ledger)
    ledger.promote(1, "better")
    for _ in range(3 * MOST_UNUSED):
        added(ledger)
    kept = {version.number for version in ledger.read().versions}
    assert {0, 1} < kept
    assert len(list((ledger.folder / "heads").iterdir())) == len(kept) - 1 <= MOST_UNUSED + 2


def test_a_file_that_is_none_is_an_error_that_names_it(ledger):
    added(ledger)
    (ledger.folder / LEDGER_FILE).write_text("{")
    with pytest.raises(LedgerError, match=LEDGER_FILE):
        ledger.read()


def test_writers_of_equal_process_ids_do_not_touch_each_others_files(ledger):
    def write(folder):
        (folder / "model.safetensors").write_text("first")
        added(ledger, "second")  # by another container, whose process has the same id
        assert (folder / "model.safetensors").read_text() == "first"

    assert ledger.add(write, "operator", "made") == 2
    texts = [(ledger.folder_of(number) / "model.safetensors").read_text() for number in (1, 2)]
    assert texts == ["second", "first"]
    assert sorted(path.name for path in (ledger.folder / "heads").iterdir()) == ["00001", "00002"]


def test_what_a_killed_writer_left_is_removed_a_day_later_and_not_before(ledger):
    left = [ledger.folder / "heads" / f"new.{name}.tmp" for name in ("old", "new")]
    for folder in left:
        folder.mkdir(parents=True)
    os.utime(left[0], (0, 0))
    added(ledger)
    assert [folder.exists() for folder in left] == [False, True]


def _promote_for_ever(folder, configured):
    ledger = HeadLedger(folder, configured, "model")
    while True:
        for number in (1, 2):
            ledger.promote(number, "in turn")


@pytest.mark.slow
def test_killed_writers_leave_a_whole_file_and_no_lock(ledger, tmp_path):
    added(ledger)
    added(ledger)
    for _ in range(5):
        writer = multiprocessing.get_context("fork").Process(
            target=_promote_for_ever, args=(ledger.folder, tmp_path / "configured")
        )
        writer.start()
        before = ledger.read().counts.get("promoted", 0)
        while ledger.read().counts.get("promoted", 0) < before + 20:
            pass
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        assert {ledger.read().served, ledger.read().previous} <= {0, 1, 2}
        ledger.promote(1, "after the kill")
    json.loads((ledger.folder / LEDGER_FILE).read_text())


def test_turns_are_taken_one_at_a_time(ledger):
    with ledger.turn() as first, ledger.turn() as second:
        assert (first, second) == (True, False)
    with ledger.turn() as third:
        assert third


def of_length(length, rounds):
    """Rounds that accept 0 and 4 tokens, in the shares that make this many tokens per round."""
    fours = round(rounds * (length - 1) / 4)
    return Accepted(rounds, 4 * rounds, 4 * fours, 16 * fours)


def test_a_version_is_rolled_back_where_it_is_worse_beyond_chance():
    old = of_length(3.0, 5000)
    assert fell_below(of_length(2.0, LEAST_ROUNDS), old) is not None
    assert "2.000 tokens per round" in fell_below(of_length(2.0, LEAST_ROUNDS), old)
    assert fell_below(of_length(2.95, 1000), old) is None
    assert fell_below(of_length(3.4, 1000), old) is None
    assert fell_below(of_length(1.0, LEAST_ROUNDS - 1), old) is None, "too few rounds"
    assert fell_below(of_length(1.0, LEAST_ROUNDS), Accepted()) is None, "nothing to compare it with"
