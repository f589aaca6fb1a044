"""Engines and the requests of a day, made up: what policies of scaling are tried on without engines."""

import bisect
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from wingbeat.cluster.autoscaling import ReplicaLoad
from wingbeat.cluster.engine_speed import EngineSpeed
from wingbeat.cluster.routing import AnswerLength

DAY_S = 86_400.0
NUM_SLOTS = 16
WRITTEN_PER_S = {1: 170.0, 4: 416.0, 16: 698.0}
"""Tokens that the demo's engine writes per second by sequences at once: README, beside vLLM."""
PROMPT_PER_S = 3_000.0
KV_TOKENS = 32_768
START_S = 20.0
"""From the decision for a replica to its first request."""


@dataclass(slots=True)
class SimulatedRequest:
    """One request, and how far it is."""

    arrived_s: float
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    uncomputed: float = 0.0
    unwritten: float = 0.0
    started_s: float | None = None


def day(rng: random.Random, peak_per_s: float, day_s: float = DAY_S) -> Iterator[SimulatedRequest]:
    """Requests in order of arrival: quiet at night, most after noon, and six bursts of ten minutes at twice the rate.

    Three of four are chats, whose prompts and answers are short; the others are documents with short answers.
    """
    bursts = sorted(rng.uniform(0, day_s) for _ in range(6))
    now = 0.0
    while True:
        now += rng.expovariate(2 * peak_per_s)
        if now >= day_s:
            return
        rate = 0.04 + 0.96 * max(0.0, math.sin(math.pi * (now / day_s * 24 - 6) / 16)) ** 1.5
        last = bisect.bisect_right(bursts, now) - 1
        if last >= 0 and now - bursts[last] < 600:
            rate *= 2
        if rng.random() < rate / 2:
            is_chat = rng.random() < 0.75
            prompt = rng.lognormvariate(math.log(200 if is_chat else 2000), 0.6)
            answer = rng.lognormvariate(math.log(120 if is_chat else 40), 0.7)
            limit = 1024
            answer = max(1, min(limit, int(answer)))
            yield SimulatedRequest(now, max(1, int(prompt)), answer, limit, float(int(prompt) or 1), float(answer))


@dataclass
class SimulatedEngine:
    """Runs prompts one after the other, and writes for all that are computed."""

    ready_s: float
    running: list[SimulatedRequest] = field(default_factory=list)
    waiting: deque[SimulatedRequest] = field(default_factory=deque)
    answers: AnswerLength = field(default_factory=AnswerLength)
    speed: EngineSpeed = field(default_factory=lambda: EngineSpeed(NUM_SLOTS))
    num_passed: float = 0.0
    leaving: bool = False

    @property
    def num_requests(self) -> int:
        """Those that run and those that wait."""
        return len(self.running) + len(self.waiting)

    def run(self, now: float, seconds: float) -> list[SimulatedRequest]:
        """Work for so long; returns what began to write."""
        while self.waiting and len(self.running) < NUM_SLOTS:
            self.running.append(self.waiting.popleft())
        begun = []
        for request in self.running:
            if request.uncomputed and seconds > 0:
                done = min(request.uncomputed, seconds * PROMPT_PER_S)
                request.uncomputed -= done
                seconds -= done / PROMPT_PER_S
                if not request.uncomputed:
                    request.started_s = now
                    self.num_passed += request.prompt_tokens
                    begun.append(request)
        writing = [request for request in self.running if not request.uncomputed]
        if writing and seconds > 0:
            share = _written_per_s(len(writing)) / len(writing) * seconds
            for request in writing:
                written = min(share, request.unwritten)
                request.unwritten -= written
                self.num_passed += written
                if not request.unwritten:
                    self.answers.add(request.answer_tokens)
        self.running = [request for request in self.running if request.unwritten]
        return begun

    def load(self, now: float) -> ReplicaLoad:
        """What the replica reports: it knows what is allowed, and not how long an answer will be."""
        self.speed.look(int(self.num_passed), self.num_requests, now)
        expected = self.answers.expected_tokens
        started = [request for request in self.running if request.started_s is not None]
        left = [request.max_tokens - request.answer_tokens + request.unwritten for request in self.running]
        num_tokens = sum(request.prompt_tokens for request in self.waiting) + sum(
            request.prompt_tokens for request in self.running if request.started_s is None
        )
        num_tokens += sum(expected(int(one)) for one in left) + len(self.waiting) * expected(1024)
        held = sum(r.prompt_tokens + r.answer_tokens - r.unwritten for r in started)
        rate = self.speed.tokens_per_s
        return ReplicaLoad(self.num_requests, len(started), num_tokens, held / KV_TOKENS, NUM_SLOTS, rate)


def _written_per_s(num_seqs: int) -> float:
    sizes = list(WRITTEN_PER_S)
    above = min(bisect.bisect_left(sizes, num_seqs), len(sizes) - 1)
    below = max(0, above - 1)
    if above == below or num_seqs >= sizes[-1]:
        return WRITTEN_PER_S[sizes[above]]
    share = math.log(num_seqs / sizes[below]) / math.log(sizes[above] / sizes[below])
    return WRITTEN_PER_S[sizes[below]] * (WRITTEN_PER_S[sizes[above]] / WRITTEN_PER_S[sizes[below]]) ** share
