"""The shared-memory segment that names a channel between processes: contents and refusals."""

import dataclasses
import fcntl
import os
import stat
import threading

import pytest

from tests.cluster.peers import SPEC
from wingbeat.cluster.channels import segment, segment_files
from wingbeat.cluster.channels.doorbell import process_start
from wingbeat.cluster.channels.header import ChannelError, Word
from wingbeat.cluster.channels.memory import buffer_bytes, check_fits
from wingbeat.cluster.channels.segment_files import PREFIX, SHM_DIR, UNFINISHED, remove_stale_segments, segment_path
from wingbeat.cluster.channels.shm import ShmChannel


@pytest.mark.parametrize("taps_size", [0, 12288], ids=["no-taps", "large"])
def test_the_spec_travels_with_the_segment(name: str, taps_size: int) -> None:
    spec = dataclasses.replace(SPEC, taps_size=taps_size, num_slots=17, max_prefill_tokens=1024)
    channel = ShmChannel.create(name, spec)
    drafter = ShmChannel.attach(name, 1)
    assert drafter.spec == spec
    outcome = channel.verifier_end.acquire_outcome(0.0)
    outcome.chunk_taps.fill_(3)
    channel.verifier_end.token_ids[-1, -1] = 9
    channel.verifier_end.publish_outcome()
    assert drafter.poll_outcome().chunk_taps.shape == (1024, taps_size)
    assert bool((drafter.poll_outcome().chunk_taps == 3).all())
    assert drafter.token_ids[-1, -1] == 9
    channel.verifier_end.close()


def test_a_segment_that_dev_shm_cannot_hold_is_refused_before_it_is_touched(name: str) -> None:
    spec = dataclasses.replace(SPEC, max_model_len=2**45)
    with pytest.raises(ChannelError, match="MiB are free"):
        ShmChannel.create(name, spec)


def test_slots_that_do_not_fit_are_refused_with_the_number_that_does(name: str) -> None:
    spec = dataclasses.replace(SPEC, num_slots=2**36)
    with pytest.raises(ChannelError, match=rf"max_num_seqs is {2**36}: .* MiB are free; \d+ fit") as caught:
        ShmChannel.create(name, spec)
    fitting = int(str(caught.value).split()[-2])
    free = buffer_bytes(dataclasses.replace(SPEC, num_slots=fitting))
    check_fits(dataclasses.replace(SPEC, num_slots=fitting - 1), free)
    with pytest.raises(ChannelError, match=f"max_num_seqs is {2 * fitting}"):
        check_fits(dataclasses.replace(SPEC, num_slots=2 * fitting), free)


@pytest.mark.parametrize("free", [0, 1000])
def test_a_channel_whose_rounds_alone_do_not_fit_names_what_makes_them_large(free: int) -> None:
    with pytest.raises(ChannelError, match=r"max_num_batched_tokens is .* max_model_len is"):
        check_fits(SPEC, free)


@pytest.mark.parametrize("bad", ["", "a/b", "a\0b", "x" * 300], ids=["empty", "slash", "nul", "long"])
def test_a_name_that_is_no_file_name_is_refused(bad: str) -> None:
    with pytest.raises(ChannelError, match="must be a file name"):
        ShmChannel.create(bad, SPEC)


def test_attaching_to_nothing_says_so(name: str) -> None:
    with pytest.raises(ChannelError, match=f"no channel '{name}'"):
        ShmChannel.attach(name, 1)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (Word.MAGIC, 7, "foreign header"),
        (Word.VERSION, 999, "layout version 999"),
        (Word.HEADER_BYTES, 3, "damaged header"),
        (Word.HEADER_BYTES, -1, "damaged header"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(name: str, word: int, value: int, message: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    channel.verifier_end._words[word] = value
    with pytest.raises(ChannelError, match=message):
        ShmChannel.attach(name, 1)
    channel.verifier_end.close()


def test_a_file_that_is_no_segment_is_refused_and_left_alone(name: str) -> None:
    path = SHM_DIR / f"{PREFIX}{name}"
    for content, message in ((b"short", "is not a channel"), (b"\xff" * 8192, "foreign header")):
        path.write_bytes(content)
        with pytest.raises(ChannelError, match=message):
            ShmChannel.attach(name, 1)
        remove_stale_segments()
        assert path.read_bytes() == content
    path.unlink()


def test_a_truncated_segment_is_refused(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    os.truncate(SHM_DIR / f"{PREFIX}{name}", segment.HEADER_BYTES)
    with pytest.raises(ChannelError, match="requires another size"):
        ShmChannel.attach(name, 1)
    os.truncate(SHM_DIR / f"{PREFIX}{name}", 1 << 20)
    channel.verifier_end.close()


def test_drafts_of_segments_are_removed_with_their_dead_maker(name: str) -> None:
    dead = SHM_DIR / f"{PREFIX}{name}.{os.getpid()}.1{UNFINISHED}"
    live = SHM_DIR / f"{PREFIX}{name}.{os.getpid()}.{process_start(os.getpid())}{UNFINISHED}"
    dead.touch()
    live.touch()
    remove_stale_segments()
    assert not dead.exists()
    assert live.exists()
    live.unlink()


def test_no_other_user_can_open_a_segment(name: str) -> None:
    old = os.umask(0)
    try:
        channel = ShmChannel.create(name, SPEC)
    finally:
        os.umask(old)
    assert stat.S_IMODE(segment_path(name).stat().st_mode) == 0o600
    channel.verifier_end.close()


def test_a_pipe_of_that_name_holds_nobody_up_and_is_left_alone(name: str) -> None:
    path = segment_path(name)
    os.mkfifo(path)
    try:
        cleaning = threading.Thread(target=remove_stale_segments, daemon=True)
        cleaning.start()
        cleaning.join(30.0)
        stuck = cleaning.is_alive()
        if stuck:
            os.close(os.open(path, os.O_WRONLY))
            cleaning.join()
        assert not stuck
        assert path.exists()
    finally:
        path.unlink()


def test_a_link_is_not_followed_to_a_segment(name: str) -> None:
    channel = ShmChannel.create(name, SPEC)
    link = segment_path(f"{name}.link")
    link.symlink_to(segment_path(name))
    try:
        with pytest.raises(ChannelError, match="cannot open channel"):
            ShmChannel.attach(f"{name}.link", 1)
    finally:
        link.unlink()
        channel.verifier_end.close()


def test_a_lock_that_somebody_keeps_holds_nobody_up_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(segment_files, "LOCK_S", 0.1)
    kept = os.open(segment_files.SHM_DIR, os.O_RDONLY)
    try:
        fcntl.flock(kept, fcntl.LOCK_EX)
        with segment_files.directory_lock() as held:
            assert not held
        assert segment_files.remove_stale_segments() == 0
    finally:
        os.close(kept)
    with segment_files.directory_lock() as held:
        assert held
