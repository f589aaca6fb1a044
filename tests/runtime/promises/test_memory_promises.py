"""Memory that one process has set aside is not free to another, however the process has ended or uses it."""

import json
import mmap
import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wingbeat.runtime import free_memory as free_memory_module
from wingbeat.runtime.free_memory import free_memory
from wingbeat.runtime.promises.memory_promises import MemoryPromises

MIB = 2**20
SPAWN = multiprocessing.get_context("spawn")


def other_engine(folder: Path, pipe: Connection) -> None:
    """Promise 64 MiB, map 48 of them, touch 16 of these; each as it is told to."""
    promises = MemoryPromises(folder)
    with promises.settling():
        promises.promise(64 * MIB)
    pipe.send("promised")
    pipe.recv()
    memory = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages = np.frombuffer(memory, dtype=np.uint8)
    promises.map(memory, pages.ctypes.data)
    pipe.send("mapped")
    pipe.recv()
    pages[: 16 * MIB] = 1
    pipe.send("touched")
    pipe.recv()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[SPAWN.Process, Connection]]:
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=other_engine, args=(tmp_path, theirs))
    process.start()
    assert ours.recv() == "promised"
    yield process, ours
    process.kill()
    process.join()


def test_what_an_engine_sets_aside_is_not_free_until_the_engine_ends(
    tmp_path: Path, engine: tuple[SPAWN.Process, Connection], monkeypatch: pytest.MonkeyPatch
):
    process, pipe = engine
    seen = MemoryPromises(tmp_path)
    monkeypatch.setattr(free_memory_module, "hooks", lambda name: (seen.untouched,))
    monkeypatch.setattr(free_memory_module, "_of_machine", lambda name: 100 * MIB)
    monkeypatch.setattr(free_memory_module, "_number", lambda file: None)
    assert free_memory() == 36 * MIB
    pipe.send("")
    assert pipe.recv() == "mapped"
    assert free_memory() == 36 * MIB
    pipe.send("")
    assert pipe.recv() == "touched"
    # The kernel counts the touched pages by itself.
    assert free_memory() == 52 * MIB
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert free_memory() == 100 * MIB
    assert not list(tmp_path.iterdir())


def test_two_engines_do_not_settle_at_once(tmp_path: Path):
    free, taken = 100 * MIB, []
    for _ in range(3):
        promises = MemoryPromises(tmp_path)
        with promises.settling():
            share = (free - promises.untouched()) // 2
            promises.promise(share)
        taken.append((promises, share))
    assert [share // MIB for _, share in taken] == [50, 25, 12]


def test_a_second_promise_is_in_place_of_the_first(tmp_path: Path):
    promises = MemoryPromises(tmp_path)
    promises.promise(8 * MIB)
    promises.promise(3 * MIB)
    assert promises.untouched() == 3 * MIB


def test_what_is_no_promise_counts_nothing(tmp_path: Path):
    (tmp_path / "wingbeat-memory.1.x").write_text("{")
    (tmp_path / "wingbeat-memory.2.x").touch()
    (tmp_path / "another").write_text("9" * 9)
    assert MemoryPromises(tmp_path).untouched() == 0


def test_a_mapping_that_ends_in_the_midst_of_a_write_is_no_longer_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    promises, kept = MemoryPromises(tmp_path), [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(3)]
    for place, memory in enumerate(kept):
        promises.map(memory, place)
    del memory
    dumps = json.dumps

    def as_a_collector_would(said: dict[str, Any]) -> str:
        text = dumps(said)
        if len(kept) > 1:
            kept.pop()
        return text

    monkeypatch.setattr(json, "dumps", as_a_collector_would)
    promises.promise(MIB)
    (file,) = tmp_path.glob("wingbeat-memory.*")
    assert json.loads(file.read_text())["mapped"] == [[0, mmap.PAGESIZE]]


def test_mappings_of_many_threads_are_all_promised(tmp_path: Path):
    promises = MemoryPromises(tmp_path)
    kept = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(400)]

    def map_each(thread: int):
        for place in range(thread, len(kept), 4):
            promises.map(kept[place], place * mmap.PAGESIZE)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(map_each, range(4)))
    (file,) = tmp_path.glob("wingbeat-memory.*")
    assert len(json.loads(file.read_text())["mapped"]) == len(kept)
