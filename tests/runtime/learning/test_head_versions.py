"""A ledger says one thing to everybody, whoever is killed, and leads back to where it came from."""

import json
import multiprocessing
import os
import signal
import stat

import pytest

from wingbeat.runtime.learning.head_counts import LEAST_ROUNDS, Accepted, HeadCounts, fell_below
from wingbeat.runtime.learning.head_versions import COPY_FILE, LEDGER_FILE, MOST_TRIES, MOST_UNUSED, HeadLedger
from wingbeat.runtime.learning.ledger import Ledger, LedgerError


@pytest.fixture
def ledger(tmp_path):
    return HeadLedger(tmp_path / "ledger", tmp_path / "configured", "model")


def added(ledger, text="weights", source="learner", serve=False):
    return ledger.add(lambda folder: (folder / "model.safetensors").write_text(text), source, "made", serve)


def promoted(ledger):
    """A version more, which is served and was taken; its number."""
    number = added(ledger, serve=True)
    ledger.took(number)
    return number


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


def test_a_damaged_file_is_read_from_its_copy_and_written_anew_with_the_next_decision(ledger):
    promoted(ledger)
    (ledger.folder / LEDGER_FILE).write_text("{")
    assert ledger.read().served == 1
    ledger.roll_back("by hand")
    assert json.loads((ledger.folder / LEDGER_FILE).read_text())["served"] == 0


def test_with_a_damaged_copy_too_the_error_names_file_and_command_and_the_command_repairs_it(ledger):
    numbers = [promoted(ledger), promoted(ledger)]
    with pytest.raises(LedgerError, match="nothing to repair"):
        ledger.repair()
    for name in (LEDGER_FILE, COPY_FILE):
        (ledger.folder / name).write_bytes(b"\xff{")
    with pytest.raises(LedgerError, match=f"{LEDGER_FILE} cannot be read.*wingbeat drafter repair"):
        ledger.read()
    ledger.repair(served=2)
    found = ledger.read()
    assert [version.number for version in found.versions] == [0, *numbers]
    assert (found.served, found.previous, found.version(1).state) == (2, 0, "waiting")
    assert (ledger.checked_folder(1) / "model.safetensors").read_text() == "weights"


def test_a_file_of_a_ledger_without_further_roll_backs_is_read(ledger):
    promoted(ledger)
    content = json.loads((ledger.folder / LEDGER_FILE).read_text())
    del content["earlier"]
    (ledger.folder / LEDGER_FILE).write_text(json.dumps(content))
    assert (ledger.read().served, ledger.read().previous) == (1, 0)


def without_decisions(ledger) -> Ledger:
    """Contents of a ledger, without the record of decisions and refused versions."""
    found = ledger.read()
    kept = tuple(version for version in found.versions if version.state != "refused")
    return found.model_copy(update={"versions": kept, "counts": {}, "decisions": ()})


def test_refused_versions_leave_nothing_but_a_line_and_take_no_way_back(ledger):
    for _ in range(2):
        promoted(ledger)
    waiting = [added(ledger) for _ in range(MOST_UNUSED)]
    before = without_decisions(ledger)
    for number in range(7, 7 + 3 * MOST_UNUSED):
        assert added(ledger, "noise", "operator", serve=True) == number
        ledger.refuse(number, "its numbers are not finite")
        assert without_decisions(ledger) == before
    assert (before.served, before.previous, ledger.read().decisions[-1].what) == (2, 1, "refused")
    assert sum(version.state == "refused" for version in ledger.read().versions) <= MOST_UNUSED + 1
    names = {path.name for path in (ledger.folder / "heads").iterdir()}
    assert names == {f"{number:05d}" for number in (1, 2, *waiting)}


def test_several_pushes_that_are_refused_one_after_the_other_leave_the_way_back(ledger):
    for _ in range(3):
        promoted(ledger)
    before = without_decisions(ledger)
    pushed = [added(ledger, "noise", "operator", serve=True) for _ in range(5)]
    for number in pushed:
        ledger.refuse(number, "no head")
    assert without_decisions(ledger) == before
    for served in (2, 1, 0):
        ledger.roll_back("by hand")
        assert ledger.read().served == served


def test_no_roll_back_leads_to_a_version_that_was_refused_later(ledger):
    for _ in range(3):
        promoted(ledger)
    ledger.refuse(2, "a drafter was slow to read it")
    ledger.roll_back("by hand")
    assert ledger.read().served == 1


def test_files_that_were_damaged_on_disk_are_told_by_their_checksum(ledger):
    added(ledger)
    assert ledger.checked_folder(1) == ledger.folder_of(1)
    (ledger.folder_of(1) / "model.safetensors").write_text("weightz")
    with pytest.raises(LedgerError, match="version 1 of the head are damaged"):
        ledger.checked_folder(1)


def test_nobody_but_their_owner_reads_what_a_ledger_holds(ledger):
    promoted(ledger)
    HeadCounts(ledger.folder).add({1: Accepted(1)}, ledger.read())
    with ledger.turn():
        pass
    paths = [ledger.folder, *ledger.folder.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_dir()} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in paths if path.is_file()} == {0o600}
    assert len(paths) > 6


def test_writers_of_equal_process_ids_do_not_touch_each_others_files(ledger):
    def write(folder):
        (folder / "model.safetensors").write_text("first")
        added(ledger, "second")  # by another container, whose process has the same id
        assert (folder / "model.safetensors").read_text() == "first"

    assert ledger.add(write, "operator", "made") == 2
    texts = [(ledger.folder_of(number) / "model.safetensors").read_text() for number in (1, 2)]
    assert texts == ["second", "first"]
    assert sorted(path.name for path in (ledger.folder / "heads").iterdir()) == ["00001", "00002"]


def test_what_a_killed_writer_left_is_removed_by_the_next_one_and_what_is_being_written_is_not(ledger):
    left = ledger.folder / "heads" / "new.killed.tmp"
    left.mkdir(parents=True)

    def write(folder):
        added(ledger)
        assert folder.exists()
        assert not left.exists()

    ledger.add(write, "operator", "made")


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
