"""vLLM's rollout routes over engines of this process: errors are named and change no text."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from safetensors.torch import save_file

from tests.deployments.http_world import call
from tests.deployments.rollouts.held_engine import NEW, NUM_TOKENS, PROMPTS, Card, Held
from tests.deployments.rollouts.rollout_fleet import (
    OUT_OF_ORDER,
    UNFIT,
    Fleet,
    ask,
    check_out_of_order,
    check_unfit,
    in_eight_bits,
)
from tests.needs import needs
from tests.runtime.models import random_model
from wingbeat.deployments.api.access import Access


@pytest.fixture(scope="module")
def by_old() -> list[list[int]]:
    return Fleet().texts()[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    random_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def fleet(checkpoint: Path) -> Fleet:
    return Fleet(checkpoint)


@pytest.fixture
def file(tmp_path: Path) -> str:
    save_file(NEW, tmp_path / "new.safetensors")
    return str(tmp_path / "new.safetensors")


def test_a_step_as_vllm_s_own_client_takes_it(fleet: Fleet, file: str, by_old):
    """Bodies of vLLM's client: none for a start, `init_info` and `update_info` for the other calls."""
    assert ask(fleet, "/pause?mode=keep").json() == {"status": "paused"}
    assert ask(fleet, "/is_paused", method="GET").json() == {"is_paused": True}
    assert ask(fleet, "/start_weight_update").json() == {"message": "Weight update started"}
    assert ask(fleet, "/update_weights", {"update_info": {"files": [file]}}).json() == {"message": "Weights updated"}
    done = ask(fleet, "/finish_weight_update", {"weight_version": "1"})
    assert done.json() == {"message": "Weight update finished", "num_tensors": len(NEW)}
    assert ask(fleet, "/resume").json() == {"status": "resumed"}
    assert ask(fleet, "/weight_info", method="GET").json() == {"weight_version": "1"}
    first, second = fleet.texts()
    assert first == second != by_old
    assert len(set(fleet.weights.values())) == 1


def test_a_step_as_skyrl_s_client_takes_it(fleet: Fleet, file: str, by_old):
    """Queries without a body, a body on a GET, and the methods of its worker extension; answers have a length."""

    def rpc(method: str, **kwargs: Any) -> dict:
        answer = ask(fleet, "/collective_rpc", {"method": method, **({"kwargs": kwargs} if kwargs else {})})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["results"]) == 2
        return answer.json()["results"][0]

    sizes = ask(fleet, "/get_world_size", {}, method="GET")
    assert (sizes.json(), int(sizes.headers["content-length"])) == ({"world_size": 2}, len(sizes.content))
    assert ask(fleet, "/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert rpc("skyrl_sleep_for_weight_sync", offload_kv=True) == {"status": "sleeping"}
    assert rpc("skyrl_wake_for_weight_sync", tags=["weights"]) == {"status": "awake"}
    assert rpc("skyrl_start_weight_update", is_checkpoint_format=True) == {"message": "Weight update started"}
    assert rpc("update_weights_nccl", update_info={"files": [file]}) == {"message": "Weights updated"}
    assert rpc("skyrl_finish_weight_update")["num_tensors"] == len(NEW)
    assert rpc("skyrl_wake_for_weight_sync", tags=["kv_cache"]) == {"status": "awake"}
    assert ask(fleet, "/resume", b"").json() == {"status": "resumed"}
    by_new, _ = fleet.texts()
    assert by_new != by_old
    assert ask(fleet, "/sleep?level=1").json() == {"status": "sleeping"}
    assert ask(fleet, "/wake_up?tags=weights&tags=kv_cache").json() == {"status": "awake"}
    assert ask(fleet, "/is_sleeping", method="GET").json() == {"is_sleeping": False}
    assert fleet.texts() == [by_new] * 2


def test_requests_kept_over_skyrl_s_sleep_end_by_the_new_weights(fleet: Fleet, file: str):
    for held in fleet.held.values():
        held.add("kept")
        held.run(3)
    ask(fleet, "/pause?mode=keep&clear_cache=false")
    for method, kwargs in (
        ("skyrl_sleep_for_weight_sync", {"offload_kv": False}),
        ("skyrl_wake_for_weight_sync", {"tags": ["weights"]}),
        ("skyrl_start_weight_update", {"is_checkpoint_format": True}),
        ("update_weights_nccl", {"update_info": {"files": [file]}}),
        ("skyrl_finish_weight_update", {}),
        ("skyrl_wake_for_weight_sync", {"tags": ["kv_cache"]}),
    ):
        assert ask(fleet, "/collective_rpc", {"method": method, "kwargs": kwargs}).status_code == 200
    ask(fleet, "/resume")
    for held in fleet.held.values():
        assert [len(one) for one in held.run().texts("kept")] == [NUM_TOKENS] * len(PROMPTS)


def test_checksums_tell_which_tensors_differ(fleet: Fleet):
    checksums = ask(fleet, "/weight_checker", {"action": "checksum"}).json()["checksums"]
    name = next(iter(checksums))
    answer = ask(fleet, "/weight_checker", {"action": "compare", "baseline": checksums | {name: "0"}}).json()
    assert answer == {"match": False, "mismatches": [name], "ranks": [0, 1]}


def test_weights_that_were_reset_serve_nothing_until_the_checkpoint_is_reloaded(fleet: Fleet, by_old):
    """The order of vLLM's example weight_checker.py."""
    original = ask(fleet, "/weight_checker", {"action": "checksum"}).json()["checksums"]
    assert ask(fleet, "/pause?mode=abort").json() == {"status": "paused"}
    assert ask(fleet, "/weight_checker", {"action": "reset"}).json() == {"status": "reset"}
    assert all(held.engine.is_held for held in fleet.held.values())
    error = ask(fleet, "/weight_checker", {"action": "compare", "baseline": original}).json()["error"]
    assert error["code"] == "wrong_order"
    done = ask(fleet, "/collective_rpc", {"method": "reload_weights", "timeout": 900}).json()
    assert done["results"][0]["num_tensors"] == len(original)
    assert set(fleet.weights.values()) == {""}
    answer = ask(fleet, "/weight_checker", {"action": "compare", "baseline": original}).json()
    assert answer == {"match": True, "mismatches": [], "ranks": [0, 1]}
    assert ask(fleet, "/resume").json() == {"status": "resumed"}
    assert fleet.texts() == [by_old, by_old]


def test_an_update_reports_the_checksums_that_it_was_asked_for(fleet: Fleet, file: str):
    ask(fleet, "/start_weight_update")
    ask(fleet, "/update_weights", {"update_info": {"files": [file]}, "checksum": True})
    told = ask(fleet, "/finish_weight_update", {}).json()["checksums"]
    assert told == ask(fleet, "/weight_checker", {"action": "checksum"}).json()["checksums"]


def test_a_verb_by_its_name_is_called_and_nothing_else(fleet: Fleet):
    done = ask(fleet, "/collective_rpc", {"method": "pause", "args": ["keep"]})
    assert done.json() == {"results": [{"status": "paused"}] * 2}
    error = ask(fleet, "/collective_rpc", {"method": "builtins.exec"}).json()["error"]
    assert (error["param"], "must be one of abort_requests" in error["message"]) == ("method", True)


def test_ray_serve_llm_s_bodies_are_read(fleet: Fleet):
    body = {"model": "demo", "options": {"level": 1}}
    assert ask(fleet, "/sleep", body).json() == {"status": "sleeping"}
    assert ask(fleet, "/is_sleeping", method="GET").json() == {"is_sleeping": True}
    assert ask(fleet, "/wakeup", {"model": "demo", "options": {"tags": ["kv_cache"]}}).json() == {"status": "awake"}


def test_an_engine_that_is_gone_is_said_and_one_that_missed_tensors_serves_nothing(fleet: Fleet, file: str):
    ask(fleet, "/start_weight_update")
    fleet.gone = {"a"}
    assert ask(fleet, "/update_weights", {"update_info": {"files": [file]}}).json()["engines_lost"].keys() == {"a"}
    fleet.gone = set()
    done = ask(fleet, "/finish_weight_update").json()
    assert (done["num_tensors"], fleet.weights.keys()) == (len(NEW), {"b"})
    assert done["engines_lost"] == {"a": f"0 of {len(NEW)} tensors have arrived"}
    first, second = fleet.texts()
    assert (first, bool(second[0])) == ([[]] * 4, True)
    for path, body in (("start", None), ("update", {"update_info": {"files": [file]}}), ("finish", None)):
        assert ask(fleet, "/update_weights" if path == "update" else f"/{path}_weight_update", body).status_code == 200
    assert not any(held.engine.is_held for held in fleet.held.values())


def test_an_engine_that_begins_anew_within_an_update_holds_up_no_other(fleet: Fleet, file: str):
    ask(fleet, "/start_weight_update")
    fleet.held["a"] = Held(backend="gloo")
    fleet.held["a"].do("lose_weights")
    lost = ask(fleet, "/update_weights", {"update_info": {"files": [file]}}).json()["engines_lost"]
    assert lost == {"a": "no weight update has started"}
    assert ask(fleet, "/finish_weight_update").json()["engines_lost"].keys() == {"a"}
    first, second = fleet.texts()
    assert (first, bool(second[0])) == ([[]] * 4, True)


def test_an_engine_that_is_gone_is_503(fleet: Fleet):
    fleet.gone = {"a", "b"}
    assert ask(fleet, "/pause").status_code == 503


WRONG: dict[str, tuple[str, str, dict | bytes | None, int, str | None]] = {
    "no such mode": ("POST", "/pause?mode=stop", None, 400, "mode"),
    "no such mode in a body": ("POST", "/pause", {"mode": "stop"}, 400, "mode"),
    "mode of a sleep": ("POST", "/sleep?mode=now", None, 400, "mode"),
    "another query": ("POST", "/pause?modes=keep", None, 400, "modes"),
    "cache": ("POST", "/pause?clear_cache=perhaps", None, 400, "clear_cache"),
    "level": ("POST", "/sleep?level=3", None, 400, "level"),
    "level as text": ("POST", "/sleep?level=deep", None, 400, "level"),
    "tags": ("POST", "/wake_up?tags=graphs", None, 400, "tags"),
    "a list": ("POST", "/pause", b"[]", 400, None),
    "no JSON": ("POST", "/pause", b"{", 400, None),
    "options": ("POST", "/pause", {"options": 3}, 400, "options"),
    "model as a number": ("POST", "/pause", {"model": 3}, 400, "model"),
    "no such model": ("POST", "/pause", {"model": "other"}, 404, "model"),
    "request ids": ("POST", "/abort_requests", {"request_ids": ["a"]}, 400, "request_ids"),
    "GET": ("GET", "/pause", None, 405, None),
    "POST": ("POST", "/is_paused", None, 405, None),
    "no init info": ("POST", "/init_weight_transfer_engine", None, 400, "init_info"),
    "init info": ("POST", "/init_weight_transfer_engine", {"init_info": {}}, 400, "init_info.master_address"),
    "init info as text": ("POST", "/init_weight_transfer_engine", {"init_info": "x"}, 400, "init_info"),
    "no update": ("POST", "/update_weights", {"update_info": {"files": ["/x"]}}, 409, None),
    "no update info": ("POST", "/update_weights", {}, 400, "update_info"),
    "finish without a start": ("POST", "/finish_weight_update", None, 409, None),
    "abort without a start": ("POST", "/abort_weight_update", None, 409, None),
    "version": ("POST", "/finish_weight_update", {"weight_version": 3}, 400, "weight_version"),
    "no version": ("POST", "/update_weight_version", None, 400, "new_version"),
    "a head of none": ("POST", "/start_draft_weight_update", None, 400, "drafter"),
    "format": ("POST", "/start_weight_update", {"is_checkpoint_format": False}, 400, "is_checkpoint_format"),
    "action": ("POST", "/weight_checker", {"action": "scrub"}, 400, "action"),
    "no baseline": ("POST", "/weight_checker", {"action": "compare"}, 400, "baseline"),
    "no method": ("POST", "/collective_rpc", {}, 400, "method"),
    "a method of itself": ("POST", "/collective_rpc", {"method": "collective_rpc"}, 400, "method"),
    "CUDA handles as pickles": ("POST", "/collective_rpc", {"method": "update_weights_ipc"}, 400, "method"),
    "too many arguments": ("POST", "/collective_rpc", {"method": "resume", "args": [1]}, 400, "args"),
}
"""Method, path, body; status and field of the answer."""


@pytest.fixture(scope="module")
def steady() -> Fleet:
    return Fleet()


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_and_changes_nothing(steady: Fleet, by_old, what: str):
    method, path, body, status, param = WRONG[what]
    answer = ask(steady, path, body, method=method)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert steady.texts() == [by_old] * 2


@pytest.fixture(scope="module", params=["plain", pytest.param("eight bits", marks=needs("cpu"))])
def any_weights(request: pytest.FixtureRequest, checkpoint: Path) -> tuple[Fleet, list]:
    """Engines whose weights are packed or not, and their texts."""
    fleet = Fleet(checkpoint) if request.param == "plain" else in_eight_bits(checkpoint)
    return fleet, fleet.texts()


@pytest.mark.parametrize("what", OUT_OF_ORDER)
def test_calls_in_a_wrong_order_are_named_and_change_no_text(any_weights, what: str):
    fleet, texts = any_weights
    check_out_of_order(fleet, what)
    assert fleet.texts() == texts


@pytest.mark.parametrize("what", UNFIT)
def test_tensors_that_do_not_fit_leave_the_old_ones(any_weights, tmp_path: Path, what: str):
    fleet, texts = any_weights
    check_unfit(fleet, tmp_path, NEW, what)
    assert fleet.texts() == texts


def test_no_engine_sleeps_where_another_has_no_room(fleet: Fleet, by_old):
    """They wake up again, and stay paused with the requests that they have kept."""
    fleet.held["b"].engine._memory = card = Card()
    card.host_is_full = True
    for held in fleet.held.values():
        held.add("kept")
        held.run(3)
    assert ask(fleet, "/sleep?level=1&mode=keep").status_code == 409
    assert not any(held.do("is_sleeping") for held in fleet.held.values())
    assert all(held.do("is_paused") for held in fleet.held.values())
    ask(fleet, "/resume")
    assert [held.run().texts("kept") for held in fleet.held.values()] == [by_old] * 2


def test_two_trainers_at_once_and_an_update_during_a_sleep_are_refused(fleet: Fleet, by_old):
    ask(fleet, "/start_weight_update")
    error = ask(fleet, "/start_weight_update").json()["error"]
    assert (error["code"], "a weight update is under way" in error["message"]) == ("wrong_order", True)
    ask(fleet, "/abort_weight_update")
    ask(fleet, "/sleep?level=2")
    assert ask(fleet, "/start_weight_update").status_code == 409
    assert ask(fleet, "/resume").status_code == 409


def test_operators_alone_change_weights(fleet: Fleet, by_old):
    access = Access(operator_keys=(SecretStr("k"),))
    for path in ("/pause", "/update_weights", "/collective_rpc"):
        assert ask(fleet, path, {}, access=access).status_code == 401
    assert fleet.texts() == [by_old] * 2


def test_a_server_without_rollouts_has_no_such_path(fleet: Fleet):
    assert call(fleet, "/pause", of_parts={}).status_code == 404
