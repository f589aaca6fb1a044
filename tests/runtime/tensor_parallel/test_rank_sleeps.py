"""A verifier over two ranks sleeps as one on a single rank does: all ranks give their memory back, or none."""

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.deployments.rollouts.held_engine import Held
from tests.deployments.rollouts.rollout_fleet import OUT_OF_ORDER, UNFIT, Fleet, ask, check_out_of_order, check_unfit
from tests.runtime.models import engine_config, generate, greedy_params, noisy, random_model, random_prompts
from tests.runtime.rollouts.host_driver import HostDriver
from tests.runtime.rollouts.test_served_weights import moved, values_of
from tests.runtime.tensor_parallel.recorded_ranks import RecordedRank
from tests.runtime.tensor_parallel.two_ranks import SecondRank, led_engine, led_model
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.graphs.graph_runner import Stage
from wingbeat.runtime.rollouts import sleep_memory
from wingbeat.runtime.rollouts.device_memory import move
from wingbeat.runtime.rollouts.sleep_memory import HostMemory
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tensor_parallel import ranks, shards
from wingbeat.runtime.verifier.loading.loader import prepare_model

EVEN = {"vocab_size": 96}
PROMPTS = random_prompts((5, 17, 40, 3), 96)
LENGTH = 30
MODEL = noisy("llama", **EVEN)
NEW = moved(MODEL)


class StubbornMemory(HostMemory):
    """Memory of a rank that cannot take the steps whose names a file holds."""

    file = Path()

    def prepare(self, change, what):
        self._refuse("prepare", change)
        super().prepare(change, what)

    def cancel(self, change, what):
        self._refuse("cancel", change)
        super().cancel(change, what)

    def carry_out(self, change, what):
        self._refuse("carry_out", change)
        super().carry_out(change, what)

    def _refuse(self, step, change):
        if f"{step} {change}" in self.file.read_text().splitlines():
            raise MemoryError("CUDA error: out of memory")


def stubborn(file: Path) -> None:
    """Called in the process of a rank: its memory is a StubbornMemory."""
    StubbornMemory.file = file
    sleep_memory.HostMemory = StubbornMemory


def on_a_simulated_gpu() -> None:
    """Called in the process of a rank: weights and KV are in memory as on a GPU, where an access of freed memory ends
    the process.
    """
    shards.hooks = lambda name: (lambda loaded, ranks, config: move(loaded, ranks, HostDriver()),)


def physical(pid: int) -> int:
    """Number of pieces of simulated GPU memory that a process holds."""
    links = (os.readlink(one) for one in Path(f"/proc/{pid}/fd").iterdir() if one.is_symlink())
    return sum("wingbeat-physical" in link for link in links)


@pytest.fixture(scope="module")
def texts() -> dict[str, list[list[int]]]:
    """Texts of one process by the old weights and by the new ones."""
    return {
        name: generate(prepare_model(model, "fresh"), engine_config(), None, PROMPTS, greedy_params(LENGTH))[0]
        for name, model in (("old", noisy("llama", **EVEN)), ("new", moved(noisy("llama", **EVEN))))
    }


@contextmanager
def held(
    second: SecondRank,
    folder: Path,
    model=MODEL,
    ends: bool = True,
    before=None,
    checkpoint=None,
    keeps_journal: bool = False,
    backend: str | None = None,
    **limits,
) -> Iterator[Held]:
    with led_model(second, model, folder, engine_config(**limits), ends=ends, before=before) as led:
        one = Held(
            inner=led_engine(led, led.limits), checkpoint=checkpoint, keeps_journal=keeps_journal, backend=backend
        )
        one.led = led
        yield one


@pytest.mark.parametrize("level", [1, 2])
def test_captured_rounds_of_ranks_outlive_a_sleep(level: int, second, tmp_path: Path, texts, monkeypatch):
    second.kill()
    monkeypatch.setattr(shards, "hooks", shards.hooks)
    on_a_simulated_gpu()
    limits, before = engine_config(max_num_seqs=2), physical(os.getpid())
    with led_model(second, MODEL, tmp_path, limits, graph_device=RecordedRank(), before=on_a_simulated_gpu) as led:
        one, pids = Held(inner=led_engine(led, led.limits, None, RecordedRank())), [os.getpid(), second.pid]
        assert written(one, "awake") == texts["old"]
        stats = one.engine.inner.runner.graphs.stats
        captured, replayed = list(stats.captured), stats.replays[Stage.BASE_DECODING]
        assert physical(pids[0]) > before
        assert physical(pids[1])
        one.do("sleep", level)
        assert list(map(physical, pids)) == [before, 0]
        one.do("wake_up", ["weights"])
        if level == 2:
            one.update(tmp_path, values_of(NEW))
        one.do("wake_up", ["kv_cache"])
        assert written(one, "later") == texts["new" if level == 2 else "old"]
        assert stats.captured == captured
        assert stats.replays[Stage.BASE_DECODING] > replayed > 0
    second.kill()


@contextmanager
def held_with_stubborn(rank: int, second: SecondRank, folder: Path, file: Path, monkeypatch) -> Iterator[Held]:
    """As `held`; a rank's memory is a StubbornMemory."""
    second.kill()
    if rank == 0:
        monkeypatch.setattr(sleep_memory, "HostMemory", StubbornMemory)
        monkeypatch.setattr(StubbornMemory, "file", file)
    with held(second, folder, before=partial(stubborn, file) if rank else None) as one:
        yield one
    second.kill()


def written(held: Held, name: str) -> list[list[int]]:
    held.add(name, PROMPTS)
    return held.run().texts(name)


@pytest.mark.parametrize("level", [1, 2])
def test_ranks_that_slept_write_what_they_wrote(level: int, second, tmp_path: Path, texts):
    with held(second, tmp_path) as one:
        one.add("kept", PROMPTS)
        one.run(4).do("pause", "keep")
        one.do("sleep", level)
        one.do("sleep", level)  # once more, which changes nothing
        assert one.run().do("is_sleeping")
        assert one.tell("resume").conflict.startswith("the engine sleeps without its kv_cache")
        if level == 2:
            assert "wake it up with tags=weights" in one.tell("start_update").conflict
            one.do("wake_up", ["weights"])
            one.update(tmp_path, values_of(MODEL))
            one.do("wake_up", ["kv_cache"])
        else:
            one.do("wake_up")
        assert one.run().texts("kept") == texts["old"]
        one.engine.check_integrity()
        one.update(tmp_path, values_of(NEW))
        assert written(one, "later") == texts["new"]


def test_ranks_that_lost_their_weights_serve_nothing_until_all_have_come(second, tmp_path: Path, texts):
    with held(second, tmp_path) as one:
        one.do("sleep", 1)
        one.do("sleep", 2)  # deeper
        assert not one.tell("wake_up").serves
        one.do("start_update")
        assert "tensors are unknown" in one.tell("finish_update").refused
        one.do("abandon_update")
        assert written(one, "early") == [[]] * len(PROMPTS)
        one.update(tmp_path, values_of(NEW))
        assert one.run().texts("early") == texts["new"]


def pss(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.M)[1]) << 10


def test_every_rank_gives_its_memory_back_to_the_system(second, tmp_path: Path):
    wide = random_model("llama", **EVEN, hidden_size=512, intermediate_size=2048, max_position_embeddings=4096)
    weights = sum(one.nbytes for one in wide.parameters()) // 2
    values = values_of(wide)
    with held(second, tmp_path, wide, max_model_len=2048, num_kv_blocks=400) as one:
        pids = os.getpid(), second.pid

        def measured() -> list[int]:
            one.do("is_paused")
            return [pss(pid) for pid in pids]

        one.engine.add_request(Request("long", (1,) * 2000, greedy_params(4)))
        one.tokens["long"] = []
        text = one.run().tokens["long"]
        awake = measured()
        one.do("sleep", 1)
        without_kv = measured()
        one.do("wake_up")
        one.do("sleep", 2)
        without_weights = measured()
        one.do("wake_up", ["weights"])
        one.update(tmp_path, values)
        one.do("wake_up")
        one.engine.add_request(Request("again", (1,) * 2000, greedy_params(4)))
        one.tokens["again"] = []
        assert one.run().tokens["again"] == text
        kv = one.led.loaded.layers[0].kv_size * len(one.led.loaded.layers) * 4 * 2000
    for first, second_, third in zip(awake, without_kv, without_weights, strict=True):
        assert first - second_ > 0.8 * kv
        assert second_ - third > 0.8 * weights


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_sleeps_or_wakes_where_one_cannot(rank: int, second, tmp_path: Path, texts, monkeypatch):
    file = tmp_path / "steps"
    file.write_text("")
    with held_with_stubborn(rank, second, tmp_path / "model", file, monkeypatch) as one:
        one.add("kept", PROMPTS)
        one.run(4).do("pause", "keep")
        file.write_text("prepare sleep")
        told = one.tell("sleep", 1)
        assert told.conflict == (
            f"the weights cannot be kept in host memory: rank {rank}: MemoryError: CUDA error: out of memory"
        )
        assert not one.do("is_sleeping")
        file.write_text("")
        one.do("sleep", 1)
        file.write_text("prepare wake")
        assert one.tell("wake_up").conflict.startswith(f"the device has no memory for the weights: rank {rank}: ")
        assert one.do("is_sleeping")
        file.write_text("")
        one.do("wake_up")
        assert one.run().texts("kept") == texts["old"]


@pytest.mark.parametrize("steps", ["carry_out sleep", "prepare sleep\ncancel sleep"])
def test_an_engine_ends_where_its_ranks_hold_different_memory(steps: str, second, tmp_path: Path, monkeypatch):
    file = tmp_path / "steps"
    file.write_text(steps)
    with held_with_stubborn(1, second, tmp_path / "model", file, monkeypatch) as one:
        told = one.tell("sleep", 1)
        assert told.conflict.startswith("the engine starts again: ranks hold different memory after a failed sleep: ")
        assert not told.serves
        assert one.engine.has_unfinished_requests()
        with pytest.raises(RoundFailed, match="rank 1: MemoryError"):
            one.engine.step()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("sleep", signal.SIGKILL),
        ("update", signal.SIGKILL),
        pytest.param("sleep", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_an_engine_ends_with_a_rank_that_is_gone(name: str, how: int, second, tmp_path: Path, monkeypatch):
    with held(second, tmp_path, ends=False) as one:
        written(one, "before")
        monkeypatch.setattr(ranks, "COLLECTIVE_S", 2.0)
        if name == "update":
            one.do("start_update")
        second.kill(how)
        if name == "sleep":
            told = one.tell("sleep", 1)
        else:
            save_file(values_of(NEW), tmp_path / "new.safetensors")
            told = one.tell("update_weights", {"files": [str(tmp_path / "new.safetensors")]})
            told = told if told.conflict else one.tell("finish_update")
        assert told.conflict.startswith("the engine starts again: rank 0 of 2 has lost another rank")
        with pytest.raises(RoundFailed, match="rank 0 of 2 has lost another rank"):
            one.engine.step()
        second.kill()
        one.led.backend.ranks.close()


def test_wrong_calls_are_named_and_change_no_text_of_ranks(second, tmp_path: Path, texts):
    checkpoint = tmp_path / "checkpoint"
    MODEL.save_pretrained(checkpoint)
    with held(second, tmp_path / "model", checkpoint=checkpoint, backend="gloo") as one:
        fleet = Fleet(held={"a": one})
        for what in OUT_OF_ORDER:
            check_out_of_order(fleet, what)
            assert written(one, what) == texts["old"], what
        for what in UNFIT:
            check_unfit(fleet, tmp_path, values_of(MODEL), what)
            assert written(one, what) == texts["old"], what
        original = ask(fleet, "/weight_checker", {"action": "checksum"}).json()["checksums"]
        assert ask(fleet, "/weight_checker", {"action": "reset"}).json() == {"status": "reset"}
        assert written(one, "noise") == [[]] * len(PROMPTS)
        assert ask(fleet, "/reload_weights").json()["num_tensors"] == len(original)
        answer = ask(fleet, "/weight_checker", {"action": "compare", "baseline": original}).json()
        assert answer == {"match": True, "mismatches": [], "ranks": [0]}
        assert one.run().texts("noise") == texts["old"]


@pytest.mark.parametrize("part", [3, None])
def test_a_journal_of_ranks_leaves_the_old_weights(part: int | None, second, tmp_path: Path, texts):
    with held(second, tmp_path / "model", keeps_journal=True) as one:
        save_file(dict(list(values_of(NEW).items())[:part]), tmp_path / "part.safetensors")
        for _ in range(2):
            one.do("start_update")
            one.do("update_weights", {"files": [str(tmp_path / "part.safetensors")]})
            assert one.tell("abandon_update").serves
            assert written(one, "old") == texts["old"]
        one.update(tmp_path, values_of(NEW))
        assert written(one, "new") == texts["new"]
