"""Engine factories for tests whose engine is a process of its own; quick to import."""

import ctypes
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.fakes import FakeEngine
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup
from wingbeat.runtime.scheduling.request import Request

if TYPE_CHECKING:
    from wingbeat.deployments.replica.engine.engine_setup import AskNeeds

INFO = ModelInfo("fake", 200, 50)
HANGS, HANGS_IN_C = 46, 47
WRITTEN_BEFORE = 10
"""Tokens of a request that makes its engine hang."""


def build_plain(config: AppConfig, ask_needs: "AskNeeds") -> EngineSetup:
    """An engine without a drafter."""
    return EngineSetup(FakeEngine(round_s=0.01), INFO, None)


def build_none(config: AppConfig, ask_needs: "AskNeeds") -> EngineSetup:
    """A checkpoint that cannot be read."""
    raise ValueError("cannot be built")


def build_unfit(config: AppConfig, ask_needs: "AskNeeds") -> EngineSetup:
    """An engine whose drafter fails its self-test."""
    from wingbeat.runtime.protocol.messages import ChannelSpec

    spec = ChannelSpec(
        num_slots=1,
        num_nodes=2,
        max_path=2,
        max_prefill_tokens=4,
        taps_size=0,
        max_model_len=16,
        max_blocks_per_seq=4,
        block_size=4,
        num_blocks=8,
    )
    return EngineSetup(FakeEngine(), INFO, spec, check_drafter=_unfit)


def _unfit(engine: FakeEngine) -> None:
    raise ValueError("unfit")


class HangingEngine(FakeEngine):
    """Hangs in a round with a prompt that begins by `HANGS` or `HANGS_IN_C`, once its answer has begun."""

    def __init__(self) -> None:
        super().__init__(round_s=0.005)
        self._num_rounds: Counter[str] = Counter()

    def compute(self, requests: list[Request]) -> None:
        for request in requests:
            self._num_rounds[request.request_id] += 1
            if self._num_rounds[request.request_id] + len(request.output_token_ids) > WRITTEN_BEFORE:
                self._hang(request.prompt_token_ids[0])

    def _hang(self, token: int) -> None:
        if token == HANGS:
            while True:
                time.sleep(0.01)
        if token == HANGS_IN_C:
            ctypes.PyDLL(None).sleep(10_000)  # as nothing else, it keeps the interpreter to itself


def build_hanging(config: AppConfig, ask_needs: "AskNeeds") -> EngineSetup:
    """An engine that some requests make hang."""
    return EngineSetup(HangingEngine(), INFO, None)


def build_slowly(config: AppConfig, ask_needs: "AskNeeds") -> EngineSetup:
    """An engine whose loading hangs."""
    time.sleep(10_000)
    return build_plain(config, ask_needs)


def token_of_weights(weights: str) -> int:
    """The only token that the engine of `build_of_weights` writes, from the digest of the pushed weights."""
    return int(weights[:8] or "0", 16) % 40


class WeightedEngine(FakeEngine):
    """An engine whose tokens depend on its weights."""

    def __init__(self, weights: str) -> None:
        super().__init__(round_s=0.01)
        self._token = token_of_weights(weights)

    def step(self) -> list[Any]:
        return [output._replace(token_ids=(self._token,)) for output in super().step()]


def build_of_weights(config: AppConfig, ask_needs: "AskNeeds") -> EngineSetup:
    """An engine whose text is that of its weights; it does not start from a folder that is called unfit."""
    from wingbeat.runtime.verifier.checkpoints.digests import weights_digest

    if config.model is not None and config.model.name == "unfit":
        raise ValueError(f"{config.model} is unfit")
    return EngineSetup(WeightedEngine("" if config.model is None else weights_digest(config.model)), INFO, None)
