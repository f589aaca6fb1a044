"""A disk that fails stops a recording until it is well again, and the figures say so."""

import errno
import time

import pytest
import torch

from tests.runtime.recordings.test_ring import HIDDEN, SPEC, TOKENS, sequence
from wingbeat.runtime.recordings import live_writer, ring
from wingbeat.runtime.recordings.live_writer import LiveWriter
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import RingWriter, RoundRing
from wingbeat.runtime.recordings.writer import RecordingWriter

PLENTY = 10**8
LONG_S = 60.0


class LibraryError(Exception):
    """Error of a library that writes files, such as safetensors: no OSError."""


ERRORS = {
    "disk full": OSError(errno.ENOSPC, "No space left on device"),
    "input or output": OSError(errno.EIO, "Input/output error"),
    "a library's": LibraryError("I/O error: No space left on device"),
}


class Disk:
    """A disk that can be made to fail."""

    def __init__(self, monkeypatch):
        self.error = None
        flush, probe = RecordingWriter.flush, live_writer.write_probe

        def checked(call):
            def checking(*args, **named):
                if self.error is not None:
                    raise self.error
                return call(*args, **named)

            return checking

        monkeypatch.setattr(RecordingWriter, "flush", checked(flush))
        for module in (live_writer, ring):
            monkeypatch.setattr(module, "write_probe", checked(probe))


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


@pytest.fixture(params=["live", "ring"])
def writer(request, tmp_path):
    limits = {"shard_bytes": 1, "retry_s": 0.01}
    if request.param == "ring":
        made = RingWriter(RoundRing(tmp_path / "rounds", PLENTY, 1e6), SPEC, **limits)
    else:
        made = LiveWriter(tmp_path / "live" / "engine", tmp_path / "live", SPEC, PLENTY, **limits)
    yield made
    made.close(LONG_S)


def until(condition):
    limit = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < limit, "it never came to be"
        time.sleep(0.002)


def put(writer, number):
    one = sequence(number)
    assert writer.reserve(one.num_bytes)
    writer.put(one)


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
def test_what_is_recorded_goes_on_once_the_disk_is_well(writer, disk, tmp_path, error):
    put(writer, 0)
    until(lambda: writer.stats.num_sequences == 1)
    disk.error = error
    put(writer, 1)
    until(lambda: not writer.is_open)
    assert str(error) in writer.stats.stopped
    assert writer.stats.num_dropped == 1
    assert not writer.reserve(1), "nothing is copied meanwhile"
    disk.error = None
    until(lambda: writer.is_open)
    assert writer.stats.stopped is None
    put(writer, 2)
    until(lambda: writer.stats.num_sequences == 2)
    folders = [path.parents[1] for path in tmp_path.rglob("index.json")]
    numbers = {int(record.taps[0, 0]) for folder in set(folders) for record in RecordingReader(folder).records()}
    assert numbers == {0, 2}
    assert writer.reserve(live_writer.MEMORY_BYTES), "memory of what was dropped came back"


def test_a_recording_that_was_full_goes_on_once_there_is_room(tmp_path):
    one_shard = TOKENS * SPEC.bytes_per_token + 5000
    root = tmp_path / "live"
    writer = LiveWriter(root / "engine", root, SPEC, int(1.2 * one_shard), shard_bytes=1, retry_s=0.01)
    for number in range(2):
        put(writer, number)
        until(lambda number=number: writer.stats.num_sequences + writer.stats.num_dropped > number)
    until(lambda: not writer.is_open)
    assert "max_bytes" in writer.stats.stopped
    for path in (root / "engine").iterdir():
        path.unlink()
    until(lambda: writer.is_open)
    put(writer, 2)
    until(lambda: writer.stats.num_sequences == 2)
    writer.close(LONG_S)
    assert [int(record.taps[0, 0]) for record in RecordingReader(root).records()] == [2]


def test_a_sequence_of_another_width_is_dropped_alone(tmp_path):
    root = tmp_path / "live"
    writer = LiveWriter(root / "engine", root, SPEC, PLENTY, shard_bytes=1)
    put(writer, 0)
    until(lambda: writer.stats.num_sequences == 1)
    other = sequence(1)
    taps = torch.zeros(TOKENS, HIDDEN)
    assert writer.reserve(taps.nbytes)
    writer.put(other._replace(taps=[taps], num_bytes=taps.nbytes))
    until(lambda: writer.stats.num_dropped == 1)
    assert writer.is_open
    put(writer, 2)
    until(lambda: writer.stats.num_sequences == 2)
    writer.close(LONG_S)
