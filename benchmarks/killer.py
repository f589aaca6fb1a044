"""Kills drafters, engines and replicas of a running application, one by one, and reports each recovery."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from engine_watch import POLL_S, EngineWatch, Sample, first_at, full_acceptance_at
from steady_load import FLOWING_S, SteadyLoad

KILLED, HUNG, ENGINE, VERIFIER = "drafter killed", "drafter hangs", "engine killed", "replica killed"
KINDS = (KILLED, HUNG, ENGINE, VERIFIER)
COSTLY = (ENGINE, VERIFIER)
"""Kinds of kill whose running requests must continue on another engine."""
HANGING_SHARE = 0.2
"""Share of the failing drafters that are stopped (SIGSTOP) instead of killed."""
LONGEST_PAUSE_S = 0.5
"""Maximum random delay before a kill in seconds, so that kills hit every phase of rounds and requests."""
GIVE_UP_S = 300.0
"""Seconds without a possible victim after which the application counts as not recovering."""
FULL_CAP_S = 20.0
"""Maximum seconds to wait for a drafter to reach its former acceptance."""


class Kill(NamedTuple):
    """A failure that was caused."""

    kind: str
    engine_id: str
    at_s: float
    incarnation: int
    """Incarnation of the drafter that was attached."""
    engine_pid: int
    known: frozenset[str]
    """Ids of the engines that had answered before."""


class Recovery(NamedTuple):
    """Seconds from a kill to each event; None if the event was not observed."""

    pause_s: float | None
    """Pause of the stream in flight that waited longest for its next token."""
    noticed_s: float | None
    """Until the engine reports its drafter as lost."""
    engine_s: float | None
    """Until the engine's successor answers."""
    attached_s: float | None
    """Until a drafter is attached again."""
    full_s: float | None
    """Until acceptance is back at its undisturbed level."""


class NoVictim(RuntimeError):
    """The application did not reach a state in which the next kill is possible."""


def schedule(drafter_kills: int, engine_kills: int, verifier_kills: int, rng: random.Random) -> list[str]:
    """Kinds of the kills to make, in random order."""
    hangs = round(HANGING_SHARE * drafter_kills)
    kinds = [HUNG] * hangs + [KILLED] * (drafter_kills - hangs) + [ENGINE] * engine_kills + [VERIFIER] * verifier_kills
    rng.shuffle(kinds)
    return kinds


class Killer:
    """Chooses victims by the state that the watch reports, and kills them.

    Args:
        undisturbed: acceptance without failures, as computed by `engine_watch.acceptance`.
        num_engines: number of engines of the application when none is down.
    """

    def __init__(
        self,
        watch: EngineWatch,
        load: SteadyLoad,
        rng: random.Random,
        undisturbed: float,
        num_engines: int,
    ) -> None:
        self.kills: list[Kill] = []
        self._watch = watch
        self._load = load
        self._rng = rng
        self._undisturbed = undisturbed
        self._num_engines = num_engines

    async def run(self, kinds: list[str], budget_s: float) -> None:
        """Makes these kills, or as many as the time budget allows; returns when the last victim has recovered.

        Raises:
            NoVictim: the application does not recover.
        """
        deadline = time.perf_counter() + budget_s
        for kind in kinds:
            await self._until(lambda kind=kind: self._victim(kind) is not None, kind)
            if time.perf_counter() > deadline:
                break
            await asyncio.sleep(self._rng.uniform(0.0, LONGEST_PAUSE_S))
            await self._until(lambda kind=kind: self._kill(kind), kind)
            # Streams that continue elsewhere may queue there; their waiting must not count against the next kill.
            await asyncio.sleep(2 * FLOWING_S if kind in COSTLY else 0.0)
        await self._until(self._all_back, "end")

    def _kill(self, kind: str) -> bool:
        """Kills a victim of this kind; returns False if there was none."""
        if (victim := self._victim(kind)) is None:
            return False
        engine_id, sample = victim
        pid = {VERIFIER: sample.pid, ENGINE: sample.engine_pid}.get(kind, sample.drafter_pid)
        now, known = time.perf_counter(), frozenset(self._watch.samples)
        try:
            os.kill(pid, signal.SIGSTOP if kind == HUNG else signal.SIGKILL)
        except ProcessLookupError:  # the process ended by itself, as the next figures will show
            return False
        self.kills.append(Kill(kind, engine_id, now, sample.incarnation, sample.engine_pid, known))
        return True

    async def _until(self, condition: Callable[[], bool], waiting_for: str) -> None:
        give_up_at = time.perf_counter() + GIVE_UP_S
        while not condition():
            if time.perf_counter() > give_up_at:
                raise NoVictim(f"{waiting_for}: no engine to kill after {GIVE_UP_S:.0f} s: {self._watch.latest()}")
            await asyncio.sleep(POLL_S)

    def _victim(self, kind: str) -> tuple[str, Sample] | None:
        """Engine that has been left alone for longest, among those that may be disturbed now."""
        ready = {engine_id: sample for engine_id, sample in self._watch.latest().items() if self._is_back(engine_id)}
        if kind in COSTLY and not self._may_lose_an_engine(ready):
            return None
        last = {kill.engine_id: kill.at_s for kill in self.kills}
        return min(ready.items(), key=lambda item: last.get(item[0], 0.0), default=None)

    def _may_lose_an_engine(self, ready: dict[str, Sample]) -> bool:
        """Whether all engines are at work, so that another one can continue the victim's requests."""
        return sum(sample.num_running > 0 for sample in ready.values()) == self._num_engines

    def _is_back(self, engine_id: str) -> bool:
        """Whether a live engine has recovered from its last failure."""
        samples = self._watch.samples[engine_id]
        appeared = Kill(VERIFIER, engine_id, samples[0].at_s, -1, 0, frozenset())
        last = next((kill for kill in reversed(self.kills) if kill.engine_id == engine_id), None)
        if not samples[-1].attached or (last is not None and last.kind == VERIFIER):
            return False
        recover = engine_recovery if last is not None and last.kind == ENGINE else drafter_recovery
        recovered = recover(last or appeared, samples, self._undisturbed)
        if recovered.attached_s is None:
            return False
        waited_s = samples[-1].at_s - (last or appeared).at_s - recovered.attached_s
        return recovered.full_s is not None or waited_s > FULL_CAP_S

    def _all_back(self) -> bool:
        latest = self._watch.latest()
        return len(latest) == self._num_engines and all(self._is_back(engine_id) for engine_id in latest)


def drafter_recovery(kill: Kill, samples: list[Sample], undisturbed: float) -> Recovery:
    """Recovery from the loss of a drafter, from its engine's samples."""
    noticed_s = first_at(samples, kill.at_s, lambda one: not one.attached or one.incarnation > kill.incarnation)
    attached_s = first_at(samples, kill.at_s, lambda one: one.attached and one.incarnation > kill.incarnation)
    full_s = None
    if attached_s is not None:
        full_s = full_acceptance_at(samples, kill.at_s + attached_s, undisturbed)
        full_s = None if full_s is None else attached_s + full_s
    return Recovery(None, noticed_s, None, attached_s, full_s)


def engine_recovery(kill: Kill, samples: list[Sample], undisturbed: float) -> Recovery:
    """Recovery from the loss of an engine, from its replica's samples."""
    later = [sample for sample in samples if sample.at_s >= kill.at_s and sample.engine_pid != kill.engine_pid]
    engine_s = first_at(later, kill.at_s, lambda one: True)
    attached_s = first_at(later, kill.at_s, lambda one: one.attached)
    return Recovery(None, None, engine_s, attached_s, full_acceptance_at(later, kill.at_s, undisturbed))


def recovery(
    kill: Kill, watched: dict[str, list[Sample]], load: SteadyLoad, undisturbed: float, until_s: float
) -> Recovery:
    """Recovery from a kill.

    Args:
        until_s: time of the next failure of the same engine; later samples do not count.
    """
    pause_s = longest_wait_s(load, kill.at_s)
    if kill.kind != VERIFIER:
        samples = [sample for sample in watched[kill.engine_id] if sample.at_s < until_s]
        recover = engine_recovery if kill.kind == ENGINE else drafter_recovery
        return recover(kill, samples, undisturbed)._replace(pause_s=pause_s)
    new = [samples for engine_id, samples in watched.items() if engine_id not in kill.known]
    successor = min(new, key=lambda samples: samples[0].at_s, default=[])
    engine_s = first_at(successor, kill.at_s, lambda one: True)
    attached_s = first_at(successor, kill.at_s, lambda one: one.attached)
    full_s = full_acceptance_at(successor, kill.at_s, undisturbed)
    return Recovery(pause_s, None, engine_s, attached_s, full_s)


def recoveries(
    kills: list[Kill], watched: dict[str, list[Sample]], load: SteadyLoad, undisturbed: float
) -> list[Recovery]:
    """Recoveries from all kills, in their order."""
    done = []
    for index, kill in enumerate(kills):
        later = [other.at_s for other in kills[index + 1 :] if other.engine_id == kill.engine_id]
        done.append(recovery(kill, watched, load, undisturbed, min(later, default=float("inf"))))
    return done


def longest_wait_s(load: SteadyLoad, at_s: float) -> float | None:
    """Longest wait for the next token among the streams in flight at an instant, in seconds; None if there are none."""
    return max((wait for trace in load.traces for wait in trace.waits_s(at_s)), default=None)


def met(kills: list[Kill], load: SteadyLoad) -> Counter:
    """Counts the requests in flight at all kills: decoding (their stream had begun), and before their first token."""
    counts: Counter = Counter()
    for kill in kills:
        for trace in load.traces:
            if trace.started_s <= kill.at_s < (trace.ended_s or float("inf")):
                begun = any(times[0] <= kill.at_s for times in trace.arrivals.values())
                counts["decoding" if begun else "prompt or queue"] += 1
    return counts
