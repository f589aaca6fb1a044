"""Stand-ins for the engine and its process, for tests of what surrounds them."""

import hashlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.deployments.replica.engine.engine_setup import EngineSetup
from wingbeat.runtime.engine.round_failed import RoundFailed
from wingbeat.runtime.kv.block_hashes import ROOT_HASH, CacheLog, hash_block
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import ALONE_TOKENS, FinishReason, Request, RequestOutput

if TYPE_CHECKING:
    from wingbeat.runtime.drafters.base import DrafterNeeds
    from wingbeat.runtime.protocol.ends import VerifierEnd

VOCAB_SIZE = 50
ANY_VOCAB_SIZE = 10**6
BLOCK_SIZE = 4
POISON = 49
"""A prompt with this token breaks the engine in the request's first round."""
DEADLY = 48
"""See `DeadlyEngine`."""


def expected_tokens(prompt: tuple[int, ...], seed: int, count: int) -> tuple[int, ...]:
    """Tokens that `FakeEngine` writes: keyed by seed and position only, like real noise."""
    return tuple(_token(seed, position) for position in range(len(prompt), len(prompt) + count))


def _token(seed: int, position: int) -> int:
    return hashlib.sha256(f"{seed}:{position}".encode()).digest()[0] % (VOCAB_SIZE - 1)


class FakeStats(NamedTuple):
    """The fields of the engine's stats that tests read."""

    num_running: int
    num_free_blocks: int
    num_blocks: int
    num_started: int


class Vanished(BaseException):
    """The end of an engine in a thread, which says as little as a killed process."""


class FakeEngine:
    """Writes one token per request and round, one block per request."""

    def __init__(
        self, round_s: float = 0.0, num_blocks: int = 64, max_model_len: int = 200, max_num_seqs: int = 64
    ) -> None:
        self.drafter_state = "none"
        self.tell_round: Callable[[int, list[str]], None] = lambda num_tokens, request_ids: None
        self.round_s = round_s
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.num_started = 0
        self.num_checks = 0
        self.num_resets = 0
        self.broken = False
        self.taken: list[Request] = []
        self._running: dict[str, tuple[Request, int]] = {}
        self.cache_log = CacheLog()
        """Tells of every prompt's full blocks as soon as it has run."""

    def add_request(self, request: Request, grammar: None = None) -> None:
        if len(request.prompt_token_ids) + request.params.max_tokens > self.max_model_len:
            raise ValueError(f"the request does not fit {self.max_model_len} tokens")
        self.num_started += 1
        self.taken.append(request)
        self._running[request.request_id] = (request, len(request.output_token_ids))

    def abort_request(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def is_waiting(self, request_id: str) -> bool:
        return request_id in list(self._running)[self.max_num_seqs :]

    def has_unfinished_requests(self) -> bool:
        return bool(self._running)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.round_s)
        items = list(self._running.items())
        alone = next((item for item in items if _runs_alone(*item[1])), None)
        running = [alone] if alone else items[: self.max_num_seqs]
        queued = [item for item in items if item not in running]
        waiting = tuple(request_id for request_id, _ in queued)
        self.tell_round(len(running), [request_id for request_id, _ in running])
        self.compute([request for _, (request, _) in running])
        if self.broken:
            raise RoundFailed("broken by the test", (), waiting)
        if any(POISON in request.prompt_token_ids for _, (request, _) in running):
            raise RoundFailed(
                "poisoned",
                tuple(request_id for request_id, (r, done) in running if done == len(r.output_token_ids)),
                waiting,
            )
        outputs = []
        for request_id, (request, done) in running:
            prompt, params = request.prompt_token_ids, request.params
            token = _token(params.seed, len(prompt) + done)
            self._running[request_id] = (request, done + 1)
            finished = done + 1 == params.max_tokens
            metrics = SpeculationMetrics(done + 1, 4 * (done + 1), 0) if finished else None
            reason = FinishReason.LENGTH if finished else None
            outputs.append(RequestOutput(request_id, (token,), reason, metrics, len(prompt) if finished else 0))
            if done == len(request.output_token_ids):
                self._cache(prompt)
            if finished:
                del self._running[request_id]
        return outputs

    def compute(self, requests: list[Request]) -> None:
        """Hook for a round's work with its requests."""

    def _cache(self, prompt: tuple[int, ...]) -> None:
        block_hash = ROOT_HASH
        for begin in range(0, len(prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
            block_hash = hash_block(block_hash, prompt[begin : begin + BLOCK_SIZE])
            self.cache_log.cached(block_hash)

    def prompts(self) -> set[tuple[int, ...]]:
        """Prompts of the requests that run or wait."""
        return {request.prompt_token_ids for request, _ in list(self._running.values())}

    def stats(self) -> FakeStats:
        running = len(self._running)
        return FakeStats(running, self.num_blocks - running, self.num_blocks, self.num_started)

    def check_integrity(self) -> None:
        self.num_checks += 1

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1
        self.cache_log.cleared()

    def attach_drafter(self, end: "VerifierEnd") -> None:
        self.drafter_state = "attached"

    def detach_drafter(self) -> None:
        self.drafter_state = "none"

    def look_for_late_drafter(self) -> None:
        """None is ever late here."""


def _runs_alone(request: Request, done: int) -> bool:
    return request.alone and done - len(request.output_token_ids) <= ALONE_TOKENS


class DeadlyEngine(FakeEngine):
    """Ends its process, or its thread by `Vanished`, as soon as it runs a prompt that begins by `DEADLY`."""

    def __init__(self, *args: Any, die: Callable[[], None] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.die = die or vanish

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        ran = {output.request_id for output in outputs}
        if any(request.prompt_token_ids[0] == DEADLY for request in self.taken if request.request_id in ran):
            self.die()
        return outputs


def vanish() -> None:
    """End an engine that runs in a thread."""
    raise Vanished


def build_deadly_engine(config: AppConfig, ask_needs: "Callable[[], DrafterNeeds]") -> EngineSetup:
    """As `build_fake_engine`, of engines that a request can kill."""
    setup = build_fake_engine(config, ask_needs)
    end = partial(os.kill, os.getpid(), signal.SIGKILL)
    engine = DeadlyEngine(setup.engine.round_s, max_model_len=setup.engine.max_model_len, die=end)
    return setup._replace(engine=engine)


def build_fake_engine(config: AppConfig, ask_needs: "Callable[[], DrafterNeeds]") -> EngineSetup:
    """Engine factory for `AppConfig.engine_factory`: slow enough that a test can act in mid-stream."""
    # Its requests may hold any token id: those of whatever tokenizer the checkpoint has.
    info = ModelInfo(config.model_name(), config.max_model_len, ANY_VOCAB_SIZE, (), "none")
    return EngineSetup(FakeEngine(round_s=0.01, max_model_len=config.max_model_len), info, None)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return once the condition holds; fails the test otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.005)
