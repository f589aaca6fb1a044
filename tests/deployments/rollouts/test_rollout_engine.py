"""An engine that is held between two rounds."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.deployments.rollouts.held_engine import NEW, NUM_TOKENS, PROMPTS, Card, Held
from tests.runtime.models import engine_config, greedy_params, new_engine, random_model
from tests.runtime.rollouts.test_served_weights import moved
from wingbeat.deployments.rollouts.rollout_engine import RolloutEngine
from wingbeat.deployments.rollouts.trainer import _free_port
from wingbeat.deployments.rollouts.wire import OperationResult
from wingbeat.runtime.rollouts.broadcasts import Broadcasts
from wingbeat.runtime.rollouts.sleep_memory import FixedMemory
from wingbeat.runtime.scheduling.request import FinishReason, Request
from wingbeat.runtime.verifier.loading.loader import prepare_model


@pytest.fixture(scope="module")
def by_old() -> list[list[int]]:
    held = Held()
    held.add()
    return held.run().texts()


@pytest.fixture(scope="module")
def by_new() -> list[list[int]]:
    engine = new_engine(prepare_model(moved(random_model("llama")), "fresh"), engine_config())
    held = Held()
    held.engine = RolloutEngine(engine)
    held.add()
    return held.run().texts()


@pytest.mark.parametrize("drafted", [False, True])
def test_what_is_kept_goes_on_by_the_same_tokens(by_old, drafted: bool):
    held = Held(drafted)
    held.add()
    held.run(3).do("pause", "keep")
    held.run()
    assert (held.do("is_paused"), held.last) == (True, {})
    held.do("resume")
    assert held.run().texts() == by_old
    held.engine.check_integrity()


def test_what_comes_during_a_pause_waits_for_its_end(by_old):
    held = Held()
    held.do("pause", "keep")
    held.add()
    assert held.run().texts() == [[]] * len(PROMPTS)
    held.do("resume")
    assert held.run().texts() == by_old


def test_what_is_aborted_keeps_the_tokens_that_it_has(by_old):
    held = Held()
    held.add()
    held.run(6).do("pause")
    held.run()
    assert {output.finish_reason for output in held.last.values()} == {FinishReason.ABORT}
    assert len(held.last) == len(PROMPTS)
    assert all(text == whole[: len(text)] for text, whole in zip(held.texts(), by_old, strict=True))
    held.engine.check_integrity()
    held.do("resume")
    held.add("later ")
    assert held.run().texts("later ") == by_old


def test_a_pause_that_waits_answers_when_all_have_ended_and_later_ones_wait(by_old):
    held = Held()
    held.add()
    held.run(3)
    told = held.operations["pause"]("wait")
    held.add("later ")
    assert not told.done()
    assert held.run().texts() == by_old
    assert told.result(0) == OperationResult()
    assert held.texts("later ") == [[]] * len(PROMPTS)
    held.do("resume")
    assert held.run().texts("later ") == by_old


def test_a_request_that_waits_for_a_pause_may_be_aborted():
    held = Held()
    held.add()
    held.run(3)
    held.operations["pause"]("wait")
    held.add("later ")
    assert held.engine.is_waiting("later 0")
    held.engine.abort_request("later 0")
    held.run().do("resume")
    held.run()
    assert "later 0" not in held.last
    assert "later 1" in held.last


@pytest.mark.parametrize("drafted", [False, True])
def test_what_begins_behind_an_update_is_written_by_the_new_weights(tmp_path: Path, by_new, drafted: bool):
    held = Held(drafted)
    held.add()
    held.run()  # prefixes of the old weights are cached
    held.update(tmp_path, NEW)
    held.add("new ")
    assert held.run().texts("new ") == by_new


def test_what_runs_goes_on_from_its_tokens_by_the_new_weights(tmp_path: Path, by_old):
    held = Held(drafted=True)
    held.add()
    held.run(6)
    before = [list(text) for text in held.texts()]
    held.update(tmp_path, NEW)
    alone = Held()
    alone.update(tmp_path, NEW)
    for index, (prompt, text) in enumerate(zip(PROMPTS, before, strict=True)):
        alone.tokens[str(index)] = list(text)
        params = greedy_params(NUM_TOKENS - len(text))
        alone.engine.add_request(Request(str(index), (*prompt, *text), params))
    assert held.run().texts() == alone.run().texts() != by_old
    held.engine.check_integrity()


def test_no_round_runs_between_the_steps_of_an_update(tmp_path: Path):
    held = Held()
    save_file(NEW, tmp_path / "new.safetensors")
    held.do("start_update")
    held.add()
    assert held.run().texts() == [[]] * len(PROMPTS)
    held.do("update_weights", {"files": [str(tmp_path / "new.safetensors")]})
    assert held.run().texts() == [[]] * len(PROMPTS)


def test_an_update_that_is_given_up_leaves_an_engine_that_serves_nothing(tmp_path: Path, by_new):
    held = Held()
    save_file(dict(list(NEW.items())[:3]), tmp_path / "part.safetensors")
    held.do("start_update")
    held.do("update_weights", {"files": [str(tmp_path / "part.safetensors")]})
    assert not held.tell("abandon_update").serves
    held.add()
    assert held.run().texts() == [[]] * len(PROMPTS)
    held.update(tmp_path, NEW)
    assert held.tell("is_paused").serves
    assert held.run().texts() == by_new


def test_a_journal_leaves_the_old_weights(tmp_path: Path, by_old):
    held = Held(keeps_journal=True)
    save_file(dict(list(NEW.items())[:3]), tmp_path / "part.safetensors")
    held.do("start_update")
    held.do("update_weights", {"files": [str(tmp_path / "part.safetensors")]})
    assert held.tell("abandon_update").serves
    held.add()
    assert held.run().texts() == by_old


def test_a_trainer_that_begins_anew_ends_the_update_of_the_one_before(tmp_path: Path, by_new):
    held = Held()
    held.do("start_update")
    assert held.tell("start_update").conflict == "a weight update is under way: finish it, or abort it"
    held.do("init_transfer", {}, 0)
    held.update(tmp_path, NEW)
    held.add()
    assert held.run().texts() == by_new


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_slept_writes_what_it_wrote(tmp_path: Path, by_new, level: int):
    held = Held()
    held.update(tmp_path, NEW)
    held.add()
    held.run(4).do("pause", "keep")
    held.do("sleep", level)
    assert held.run().do("is_sleeping")
    assert held.tell("resume").conflict.startswith("the engine sleeps without its kv_cache")
    if level == 2:
        assert "wake it up with tags=weights" in held.tell("start_update").conflict
        held.do("wake_up", ["weights"])
        held.update(tmp_path, NEW)
        held.do("wake_up", ["kv_cache"])
    else:
        held.do("wake_up")
    assert not held.do("is_sleeping")
    assert held.run().texts() == by_new
    held.engine.check_integrity()


def test_weights_that_slept_have_to_come_again():
    held = Held()
    held.do("sleep", 2)
    assert not held.tell("wake_up").serves
    held.add()
    assert held.run().texts() == [[]] * len(PROMPTS)
    assert held.tell("weight_checksums").conflict == "the weights are being updated"


def test_a_card_without_room_leaves_the_engine_asleep_and_a_host_without_room_awake(by_old):
    held, card = Held(), Card()
    held.engine._memory = card
    held.add()
    held.run(3).do("pause", "keep")
    card.host_is_full, card.is_full = True, True
    told = held.tell("sleep", 1)
    assert told.conflict == "the weights cannot be kept in host memory: CUDA error: out of memory"
    assert not held.do("is_sleeping")
    card.host_is_full = False
    held.do("sleep", 1)
    for name in ("start_update", "weight_checksums", "scramble_weights"):
        assert "wake it up with tags=weights" in held.tell(name).conflict
    assert held.tell("wake_up").conflict.startswith("the device has no memory for the kv_cache: cuMemCreate failed")
    assert held.do("is_sleeping")
    assert held.tell("resume").conflict.startswith("the engine sleeps without its kv_cache")
    card.is_full = False
    held.do("wake_up")
    assert held.run().texts() == by_old


def test_memory_that_cannot_be_freed_is_refused_before_anything_is_paused(by_old):
    held = Held()
    held.engine._memory = FixedMemory("why")
    held.add()
    assert held.tell("check_sleep", 1).refused == "why"
    held.do("check_sleep", 0)
    assert held.run().texts() == by_old


def test_a_drafter_that_comes_during_a_sleep_is_attached_at_its_end(monkeypatch: pytest.MonkeyPatch):
    """Measuring its costs runs passes, for which a sleeping engine has no memory."""
    held, attached = Held(), []
    monkeypatch.setattr(held.engine.inner, "attach_drafter", attached.append)
    held.do("sleep", 1)
    held.engine.attach_drafter("first")
    assert (attached, held.engine.drafter_state) == ([], "attached")
    held.engine.detach_drafter()
    assert held.engine.drafter_state == "none"
    held.engine.attach_drafter("second")
    held.do("wake_up", ["weights"])
    held.run()
    assert attached == []
    held.do("wake_up")
    held.run()
    held.engine.attach_drafter("third")
    assert attached == ["second", "third"]
    held.do("start_update")
    held.engine.attach_drafter("fourth")
    held.run()
    assert attached == ["second", "third"]
    held.do("abandon_update")
    held.run()
    assert attached == ["second", "third", "fourth"]


def packed(most: int) -> list[torch.Tensor]:
    """Pack tensors as vLLM's trainers do: a pack ends once it exceeds `most` bytes."""
    pieces: list[list[torch.Tensor]] = [[]]
    for value in NEW.values():
        pieces[-1].append(value.contiguous().view(-1).view(torch.uint8))
        if sum(map(len, pieces[-1])) > most:
            pieces.append([])
    return [torch.cat(piece) for piece in pieces if piece]


@pytest.mark.parametrize("packed_bytes", [None, 1, 50_000])
def test_a_trainer_broadcasts_what_it_has_announced(by_new, packed_bytes: int | None):
    held, port = Held(backend="gloo"), _free_port("127.0.0.1")
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}

    def train() -> None:
        group = Broadcasts("gloo", "127.0.0.1", port, 0, 2)
        for value in NEW.values() if packed_bytes is None else packed(packed_bytes):
            group.send(value)

    trainer = threading.Thread(target=train)
    trainer.start()
    held.do("init_transfer", info, 0)
    held.do("start_update")
    names = {"names": list(NEW), "dtype_names": ["float32"] * len(NEW), "shapes": [list(v.shape) for v in NEW.values()]}
    held.do(
        "update_weights", names | ({"packed": True, "packed_buffer_size_bytes": packed_bytes} if packed_bytes else {})
    )
    held.do("finish_update")
    trainer.join()
    held.add()
    assert held.run().texts() == by_new


def test_a_trainer_that_is_gone_ends_its_update(monkeypatch: pytest.MonkeyPatch):
    held, port = Held(backend="gloo"), _free_port("127.0.0.1")
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    trainer = threading.Thread(target=lambda: Broadcasts("gloo", "127.0.0.1", port, 0, 2).send(NEW["lm_head.weight"]))
    trainer.start()
    held.do("init_transfer", info, 0)
    held.do("start_update")
    one = {"names": ["lm_head.weight"], "dtype_names": ["float32"], "shapes": [list(NEW["lm_head.weight"].shape)]}
    held.do("update_weights", one)
    trainer.join()
    other = {"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[64]]}
    told = held.tell("update_weights", other)
    assert told.conflict.startswith("the other end of the broadcast is gone")
    assert not told.serves


WRONG = {
    "no such tensor": ({"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]}, "x is no tensor"),
    "shape": ({"names": ["model.norm.weight"], "dtype_names": ["float32"], "shapes": [[63]]}, "model.norm.weight has"),
    "dtype": ({"names": ["model.norm.weight"], "dtype_names": ["int8"], "shapes": [[64]]}, "update_info: model.norm"),
    "lists": ({"names": ["model.norm.weight"], "dtype_names": [], "shapes": [[64]]}, "update_info must have"),
    "no lists": ({"names": "model.norm.weight"}, "update_info must have"),
    "nothing": ({}, "update_info must have"),
    "handles": ({"ipc_handles_pickled": "gASV"}, "update_info.ipc_handles_pickled is not supported"),
    "buffer": ({"names": [], "dtype_names": [], "shapes": [], "packed_buffer_size_bytes": 0}, "update_info.packed_b"),
    "negative": ({"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}, "update_info: the shape of a"),
    "files": ({"files": "/x"}, "update_info.files must be"),
    "relative": ({"files": ["x.safetensors"]}, "x.safetensors must be an absolute path"),
    "absent": ({"files": ["/nowhere/x.safetensors"]}, "/nowhere/x.safetensors cannot be read"),
}


@pytest.fixture(scope="module")
def wrong() -> Held:
    held, port = Held(backend="gloo"), _free_port("127.0.0.1")
    info = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    trainer = threading.Thread(target=lambda: setattr(held, "trainer", Broadcasts("gloo", "127.0.0.1", port, 0, 2)))
    trainer.start()
    held.do("init_transfer", info, 0)
    trainer.join()
    held.do("start_update")
    return held


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_announcement_is_refused_and_waits_for_nobody(wrong: Held, what: str):
    info, reason = WRONG[what]
    assert wrong.tell("update_weights", info).refused.startswith(reason)
    assert wrong.do("num_written").num_tensors == 0


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("pause", ("stop",), "mode is 'stop'"),
        ("sleep", (3,), "level is 3"),
        ("wake_up", (["graphs"],), "tags names 'graphs'"),
        ("init_transfer", ({"master_address": "127.0.0.1"}, 0), "init_info.master_port must be"),
        (
            "init_transfer",
            ({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 1}, 0),
            "init_info.world_size is 1: engine 0 has rank 1",
        ),
        ("start_head_update", (), "drafter has no head"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name: str, arguments: tuple[Any, ...], reason: str):
    assert Held(backend="gloo").tell(name, *arguments).refused.startswith(reason)


@pytest.mark.parametrize("name", ["finish_update", "abandon_update", "num_written"])
def test_steps_without_a_start_are_refused(name: str):
    assert Held().tell(name).conflict == "no weight update has started"


def test_a_name_of_the_weights_is_kept_until_there_are_others(tmp_path: Path):
    held = Held()
    assert held.do("weight_version") is None
    assert held.do("weight_version", "1") == "1"
    held.update(tmp_path, NEW, version="2")
    assert held.do("weight_version") == "2"


def test_a_drain_ends_where_the_last_request_is_aborted():
    held = Held()
    held.add(prompts=PROMPTS[:1])
    held.run(3)
    told = held.operations["pause"]("wait")
    held.engine.abort_request("0")
    held.run()
    assert told.result(0) == OperationResult()


def test_a_loop_hears_of_rounds_and_a_sleep_that_is_refused_aborts_nothing():
    held, heard = Held(), []
    held.engine.tell_round = lambda num_tokens, request_ids: heard.append(request_ids)
    held.add()
    held.do("start_update")
    assert held.tell("check_sleep", 1).conflict.startswith("a weight update is under way")
    held.do("abandon_update")
    held.run()
    assert heard[0] == ["0", "1", "2", "3"]
    assert {output.finish_reason for output in held.last.values()} == {FinishReason.LENGTH}
