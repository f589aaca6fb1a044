"""Engines of this process behind vLLM's rollout routes, and calls that a careful trainer does not make."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.deployments.http_world import FakePool, call
from tests.deployments.rollouts.held_engine import Held
from tests.runtime.models import TREE, engine_config, new_engine, random_model
from wingbeat.deployments.fleet.every_engine import EveryEngine
from wingbeat.runtime.verifier.loading.loader import prepare_model

SERVED = {"rollouts": True}


class Fleet(FakePool):
    """Two engines, or those that are given; one may be gone."""

    def __init__(self, checkpoint: Path | None = None, held: dict[str, Held] | None = None) -> None:
        super().__init__()
        self.held = held or {name: Held(backend="gloo", checkpoint=checkpoint) for name in "ab"}
        self.gone: set[str] = set()
        self.weights: dict[str, str] = {}
        self.every_engine = EveryEngine(self._call, lambda: list(self.held))
        self.engine_ids = frozenset(self.held)

    async def _call(self, engine_id: str, name: str, *, works: bool = False, **asked: Any) -> Any:
        assert (name, asked["operation"], works) == ("ask", "rollouts", True)
        given = asked["arguments"]
        if engine_id in self.gone:
            raise ConnectionError(f"{engine_id} is gone")
        if "weights" in given:
            self.weights[engine_id] = given["weights"]
        return self.held[engine_id].tell(given["name"], *given["arguments"])

    def texts(self) -> list[list[list[int]]]:
        found = []
        for held in self.held.values():
            held.add()
            found.append(held.run().texts())
        return found


def ask(fleet: Fleet, path: str, body: dict | bytes | None = None, **more: Any):
    return call(fleet, path, body, of_parts=SERVED, **more)


UNFIT: dict[str, tuple[Callable[[dict], dict], str]] = {
    "nothing": (lambda new: {}, "no "),
    "another name": (lambda new: {"model.layers.9.mlp.up_proj.weight": new["model.norm.weight"]}, "model.layers.9"),
    "a shape": (lambda new: new | {"model.norm.weight": new["model.norm.weight"][:-1].clone()}, "model.norm.weight"),
    "NaN": (lambda new: new | {"lm_head.weight": new["lm_head.weight"] * torch.nan}, "lm_head.weight"),
    "infinity": (lambda new: new | {"lm_head.weight": new["lm_head.weight"] * torch.inf}, "lm_head.weight"),
    "integers": (lambda new: new | {"model.norm.weight": new["model.norm.weight"].long()}, "model.norm.weight"),
    "a transposed matrix": (
        lambda new: (
            new | {"model.layers.0.mlp.up_proj.weight": new["model.layers.0.mlp.up_proj.weight"].t().contiguous()}
        ),
        "model.layers.0.mlp.up_proj.weight",
    ),
}
"""Changes that make tensors unfit, and the tensor that the answer names."""


def in_eight_bits(checkpoint: Path) -> Fleet:
    """Two engines whose weights are packed, so that a write rounds them."""
    return Fleet(
        held={
            name: Held(
                inner=new_engine(
                    prepare_model(random_model("llama"), "llama", eight_bits=True), engine_config(TREE), None
                ),
                checkpoint=checkpoint,
                backend="gloo",
            )
            for name in "ab"
        }
    )


def check_unfit(fleet: Fleet, folder: Path, new: dict[str, torch.Tensor], what: str) -> None:
    """Send tensors that do not fit, and give the update up."""
    spoil, name = UNFIT[what]
    save_file(spoil(dict(new)), folder / "bad.safetensors")
    assert ask(fleet, "/start_weight_update").status_code == 200
    answer = ask(fleet, "/update_weights", {"update_info": {"files": [str(folder / "bad.safetensors")]}})
    assert answer.status_code == 400
    assert f"{answer.json()['error']['param']} {answer.json()['error']['message']}".startswith(name), answer.text
    assert ask(fleet, "/abort_weight_update").status_code == 200


Step = tuple[str, dict | None, int]
"""Path, body, status of the answer."""
START, ABORT = ("/start_weight_update", None, 200), ("/abort_weight_update", None, 200)
RELOAD = ("/reload_weights", None, 200)
OUT_OF_ORDER: dict[str, list[Step]] = {
    "starts twice": [START, ("/start_weight_update", None, 409), ("/start_draft_weight_update", None, 409), ABORT],
    "sleeps while an update is open": [
        START,
        *((f"/sleep?level={level}&mode={mode}", None, 409) for level in (1, 2) for mode in ("abort", "wait", "keep")),
        ABORT,
    ],
    "ends an update twice": [START, ABORT, (*ABORT[:2], 409), ("/finish_weight_update", None, 409)],
    "finishes without tensors": [START, ("/finish_weight_update", {}, 200), ("/finish_weight_update", {}, 409)],
    "sleeps twice": [("/sleep?level=1", None, 200), ("/sleep?level=1&mode=keep", None, 200), ("/wake_up", None, 200)],
    "sleeps deeper": [
        ("/sleep?level=1", None, 200),
        ("/sleep?level=2", None, 200),
        ("/start_weight_update", None, 409),
        ("/reload_weights", None, 409),
        ("/wake_up", None, 200),
        ("/wake_up", None, 200),
        ("/finish_weight_update", None, 409),
        RELOAD,
    ],
    "sleeps less deep afterwards": [
        ("/sleep?level=2", None, 200),
        ("/sleep?level=1", None, 200),
        ("/wake_up?tags=weights", None, 200),
        RELOAD,
        ("/sleep?level=1", None, 200),
        ("/wake_up", None, 200),
    ],
    "wakes by wrong tags": [
        ("/sleep?level=1", None, 200),
        ("/wake_up?tags=graphs", None, 400),
        ("/wake_up?tags=weights&tags=kv", None, 400),
        ("/wake_up", {"tags": [1]}, 400),
        ("/wake_up", {"tags": {}}, 400),
        ("/wake_up", {"tags": []}, 200),
        ("/resume", None, 409),
        ("/wake_up?tags=kv_cache&tags=kv_cache", None, 200),
        ("/wake_up?tags=weights", None, 200),
    ],
    "resumes asleep": [("/sleep?level=2", None, 200), ("/resume", None, 409), ("/wake_up", None, 200), RELOAD],
    "pauses in every mode": [
        *((f"/pause?mode={mode}", None, 200) for mode in ("keep", "wait", "abort", "keep")),
        ("/sleep?level=0&mode=wait", None, 200),
        ("/resume", None, 200),
        ("/resume", None, 200),
    ],
    "pauses asleep": [
        ("/sleep?level=1&mode=keep", None, 200),
        *((f"/pause?mode={mode}", None, 200) for mode in ("keep", "wait", "abort")),
        ("/resume", None, 409),
        ("/wake_up", None, 200),
    ],
    "pauses while an update is open": [
        START,
        *((f"/pause?mode={mode}", None, 200) for mode in ("keep", "wait", "abort")),
        ("/wake_up", None, 200),
        ABORT,
    ],
    "a second trainer is refused": [START, ("/init_weight_transfer_engine", {"init_info": {}}, 400), ABORT],
    "reads what is no file": [
        START,
        ("/update_weights", {"update_info": {"files": ["/dev/stdin"]}}, 400),
        ("/update_weights", {"update_info": {"files": ["/tmp"]}}, 400),
        ("/update_weights", {"update_info": {"files": [3]}}, 400),
        ("/update_weights", {"update_info": {"files": [], "names": []}}, 400),
        ("/update_weights", {"update_info": {"checkpoint": False}}, 400),
        ("/update_weights", {"update_info": {"checkpoint": True, "files": []}}, 400),
        ("/update_weights", {"update_info": {"checkpoint": True}, "checksum": "perhaps"}, 400),
        ABORT,
    ],
    "a timeout that is over": [
        ("/collective_rpc", {"method": "sleep", "timeout": 0}, 409),
        ("/wake_up", None, 200),
    ],
}
"""Calls in an order that a careful trainer avoids; afterwards the texts are as before."""


def check_out_of_order(fleet: Fleet, what: str) -> None:
    for path, body, status in OUT_OF_ORDER[what]:
        answer = ask(fleet, path, body)
        assert answer.status_code == status, (path, body, answer.text)
