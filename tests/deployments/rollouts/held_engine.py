"""An engine that is held between two rounds, and the outputs of its requests."""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.runtime.models import (
    PROMPT_LENS,
    TREE,
    eagle_drafter,
    engine_config,
    greedy_params,
    new_engine,
    random_model,
    random_prompts,
)
from tests.runtime.rollouts.test_served_weights import moved, values_of
from wingbeat.deployments.rollouts.rollout_engine import RolloutEngine
from wingbeat.deployments.rollouts.wire import OperationResult
from wingbeat.kernels.cuda_driver import CudaError
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.rollouts.sleep_memory import SleepMemory
from wingbeat.runtime.scheduling.request import Request, RequestOutput
from wingbeat.runtime.verifier.loading.loader import prepare_model

PROMPTS = random_prompts(PROMPT_LENS[:4])
NUM_TOKENS = 30
NEW = values_of(moved(random_model("llama")))


class Card(SleepMemory):
    """Memory of an engine on a GPU, which others may have filled."""

    host_is_full = is_full = False

    def prepare(self, change: str, what: int | str) -> None:
        if self.host_is_full and change == "sleep":
            raise MemoryError("CUDA error: out of memory")
        if self.is_full and what == "kv_cache":
            raise CudaError("cuMemCreate failed: out of memory (CUresult 2)")

    def carry_out(self, change: str, what: int | str) -> None:
        pass


class Held:
    """An engine and the outputs of its requests."""

    def __init__(self, drafted: bool = False, inner: Engine | None = None, **options: Any) -> None:
        if inner is None:
            loaded = prepare_model(random_model("llama"), "llama")
            drafter = eagle_drafter(loaded, TREE) if drafted else None
            inner = new_engine(loaded, engine_config(TREE), drafter)
        self.engine = RolloutEngine(inner, **options)
        self.operations: dict[str, Callable[..., Any]] = self.engine.operations()
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, RequestOutput] = {}

    def add(self, name: str = "", prompts: list[list[int]] = PROMPTS) -> None:
        for index, prompt in enumerate(prompts):
            self.tokens[f"{name}{index}"] = []
            self.engine.add_request(Request(f"{name}{index}", tuple(prompt), greedy_params(NUM_TOKENS)))

    def run(self, most: int = 10**6) -> "Held":
        for _ in range(most):
            if not self.engine.has_unfinished_requests():
                break
            for output in self.engine.step():
                self.tokens[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self.last[output.request_id] = output
        return self

    def texts(self, name: str = "") -> list[list[int]]:
        return [self.tokens[f"{name}{index}"] for index in range(len(PROMPTS))]

    def do(self, name: str, *arguments: Any) -> Any:
        told = self.tell(name, *arguments)
        assert told.refused is told.conflict is None, told
        return told.value

    def tell(self, name: str, *arguments: Any) -> OperationResult:
        told = self.operations[name](*arguments)
        return told.result(20) if isinstance(told, Future) else told

    def update(self, folder: Path, values: dict[str, torch.Tensor], **finish: Any) -> None:
        save_file(values, folder / "new.safetensors")
        self.do("start_update")
        self.do("update_weights", {"files": [str(folder / "new.safetensors")]})
        self.do("finish_update", *finish.values())
