"""The learner: trains in spare time, measures what it has in shadow, and has it served where that is better.

It is told nothing and tells nobody: rounds come by a ring on disk, heads go by a ledger, and what it says of itself is
a file. Killed at any moment, it goes on from its last checkpoint.
"""

import json
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wingbeat.runtime.learning.gate import Gate, Verdict
from wingbeat.runtime.learning.head_versions import FIGURES_FILE, HeadLedger, Ledger
from wingbeat.runtime.learning.heads import load_head
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.learning.shadow import Drafted, draft_in_shadow
from wingbeat.runtime.learning.trainer import OnlineTrainer
from wingbeat.runtime.recordings.format import RecordingError, write_atomically
from wingbeat.runtime.recordings.reader import RecordingReader
from wingbeat.runtime.recordings.ring import RoundRing
from wingbeat.runtime.training.family import TrainedHead
from wingbeat.runtime.training.sources import tap_columns

logger = logging.getLogger(__name__)
CANDIDATE = "candidate"
PAUSE_S = 1.0
MOST_HELD = 512
"""Held-out requests of one test: the newest ones."""
REPLACED_AFTER = 4
"""Candidates' worth of steps after which one without a verdict makes room for a newer one."""


class Learner:
    """One learner of one ledger.

    Args:
        load: of the machine, as `os.getloadavg()[0]`.
        sleep: seconds.
        worked: seconds of a core that this process has had.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
        sleep: Callable[[float], Any] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.process_time,
    ) -> None:
        self.settings = settings
        self.ledger = HeadLedger(settings.root, settings.configured_head, settings.verifier_name)
        self.ring = RoundRing(settings.rounds, settings.max_bytes, settings.expire_s)
        self.trainer = OnlineTrainer(settings)
        self._load, self._sleep, self._clock, self._worked = load, sleep, clock, worked
        self._served: tuple[int, TrainedHead] | None = None
        self._seen_served = self.ledger.read().served
        self._test: _Test | None = None
        self._tested_at = 0
        """Step of the last candidate."""
        self._looked_at = self._saved_at = -float("inf")
        self.state = "waiting for rounds"

    def run(self) -> None:
        """Learn until the process ends."""
        self.resume()
        while True:
            self._sleep(self.turn())

    def resume(self) -> None:
        """Go on from the last checkpoint, or anew where it cannot be read."""
        try:
            found = self.trainer.resume()
        except Exception as error:  # of any kind: what is in the file is not this program's to say
            logger.error("the learner begins anew: its checkpoint cannot be read: %s", error)
            self.trainer.restart(self.ledger.folder_of(self._seen_served))
            return
        if found:
            logger.info("the learner goes on at step %d", self.trainer.state.step)
            self._tested_at = self.trainer.state.step

    def turn(self) -> float:
        """A look, and a step or a part of a test; for how many seconds to rest then."""
        began, worked = self._clock(), self._worked()
        if began - self._looked_at >= self.settings.refresh_s:
            self._look()
        if self._load() > self.settings.max_load:
            self.state = "paused: the machine is busy"
            return PAUSE_S
        if not self._has_enough():
            self.state = "waiting for rounds"
            return PAUSE_S
        try:
            self._advance()
        except RecordingError as error:
            logger.info("a shard has gone while it was read: %s", error)
            self.trainer.refresh()
        except FloatingPointError as error:
            self._start_over(str(error))
        # A share of a core: w seconds of work are spread over w / share, the time that others took the core included.
        return max(0.0, (self._worked() - worked) / self.settings.core_share - (self._clock() - began))

    def _advance(self) -> None:
        steps = self.trainer.state.step
        if self._test is not None and not self._test.done:
            self.state = "testing a candidate"
            self._test.see_next()
            self._judge()
        elif self._test is None and steps - self._tested_at >= self.settings.candidate_steps and self._may_test():
            self._begin_test()
        elif self._test is not None and steps - self._tested_at >= REPLACED_AFTER * self.settings.candidate_steps:
            self._end_test("a newer candidate takes its place")
        else:
            self.state = "training"
            self.trainer.step()
            del self.trainer.state.losses[:-100]

    def _may_test(self) -> bool:
        held = self.trainer.held
        return held is not None and held.num_sequences >= self.settings.least_held

    def _has_enough(self) -> bool:
        source = self.trainer.source
        return source is not None and source.num_tokens >= self.settings.least_tokens

    def _look(self) -> None:
        """What came in, what is served; and a checkpoint now and then."""
        self._looked_at = self._clock()
        kept = self.ring.tidy()
        self.trainer.refresh()
        ledger = self.ledger.read()
        if ledger.served != self._seen_served:
            self._follow(ledger)
        if self._test is not None:
            self._test.renew(self.ring)
        if self._clock() - self._saved_at >= self.settings.checkpoint_s:
            self._saved_at = self._clock()
            self.trainer.save()
        self._say(kept._asdict())

    def _follow(self, ledger: Ledger) -> None:
        """Another version is served: by this learner, by an operator, or as one was rolled back."""
        version, before = ledger.version(ledger.served), self._seen_served
        self._seen_served = ledger.served
        self._test = None
        last = ledger.decisions[-1].what if ledger.decisions else None
        if version.source == "operator" or last in ("rolled_back", "refused"):
            logger.info("version %d is served in the place of %d: the learner starts from it", ledger.served, before)
            self.trainer.restart(self.ledger.folder_of(ledger.served))
            self._tested_at = 0

    def _start_over(self, reason: str) -> None:
        logger.error("the learner starts over from the head that is served: %s", reason)
        self.ledger.reject(f"training diverged: {reason}")
        self.trainer.change_pace(better=False)
        self.trainer.restart(self.ledger.folder_of(self.ledger.read().served))
        self._test, self._tested_at = None, 0

    def _begin_test(self) -> None:
        """Export what has been learnt, and load it as drafters will: what is measured is what would be served."""
        folder = self.settings.work / CANDIDATE
        shutil.rmtree(folder, ignore_errors=True)
        self.trainer.export(folder)
        candidate = load_head(folder, self.trainer.target).eval()
        ledger = self.ledger.read()
        served = self._served_head(ledger.served)
        number = self.ledger.count_test()
        gate = Gate(number, self.settings.margin, self.trainer.chain + 1)
        self._test = _Test(gate, ledger.served, candidate, served, self.trainer)
        self._test.renew(self.ring)
        self._tested_at = self.trainer.state.step
        logger.info("candidate %d, after step %d, is tested against version %d", number, self._tested_at, ledger.served)

    def _served_head(self, number: int) -> TrainedHead:
        if self._served is None or self._served[0] != number:
            self._served = number, load_head(self.ledger.folder_of(number), self.trainer.target).eval()
        return self._served[1]

    def _judge(self) -> None:
        verdict, why = self._test.gate.decide()
        if verdict is Verdict.BETTER:
            number = self.ledger.add(lambda folder: _copy(self.settings.work / CANDIDATE, folder), "learner", why)
            # Only over the head it was compared with.
            if self.ledger.read().served == self._test.against:
                self.ledger.promote(number, why)
                self._seen_served = number
            logger.info("version %d of the head is promoted: %s", number, why)
            self.trainer.change_pace(better=True)
            self._test = None
        elif verdict is Verdict.NOT_BETTER:
            self.trainer.change_pace(better=False)
            self._end_test(why)

    def _end_test(self, why: str) -> None:
        gate = self._test.gate
        self.ledger.reject(f"candidate {gate.number}: {why}")
        logger.info("candidate %d is rejected: %s", gate.number, why)
        self._test = None

    def _say(self, kept: dict[str, int]) -> None:
        """Write what there is to see of the learner."""
        state, held, source = self.trainer.state, self.trainer.held, self.trainer.source
        gate = None if self._test is None else self._test.gate
        figures = {
            "at": time.time(),
            "pid": os.getpid(),
            "state": self.state,
            "steps": state.step,
            "seconds": round(state.seconds, 1),
            "trained_tokens": state.num_tokens,
            "samples": 0 if source is None else source.num_sequences,
            "sample_tokens": 0 if source is None else source.num_tokens,
            "held_out": 0 if held is None else held.num_sequences,
            "bytes": kept["num_bytes"],
            "max_bytes": self.settings.max_bytes,
            "learning_rate": self.trainer.pace * self.settings.learning_rate,
            "loss": state.losses[-1][1] if state.losses else None,
            "candidate": None if gate is None else {"number": gate.number, "so_far": gate.decide()[1]},
        }
        self.settings.work.mkdir(parents=True, exist_ok=True)
        text = json.dumps(figures) + "\n"
        write_atomically(self.settings.work / FIGURES_FILE, lambda path: path.write_text(text, encoding="utf-8"))


class _Test:
    """A candidate and the requests that it is still to draft for."""

    def __init__(
        self, gate: Gate, against: int, candidate: TrainedHead, served: TrainedHead, trainer: OnlineTrainer
    ) -> None:
        self.gate, self.against = gate, against
        self._candidate, self._served = candidate, served
        self._family, self._chain = trainer.family, trainer.chain
        self._seen = 0
        """Held-out requests up to this moment, in nanoseconds since 1970."""
        self._waiting: deque[tuple[RecordingReader, int]] = deque()

    @property
    def done(self) -> bool:
        """Whether nothing is left to see for now."""
        return not self._waiting

    def renew(self, ring: RoundRing) -> None:
        """Take the requests that came in since, each once; what they hold is read when it is its turn."""
        new: list[tuple[RecordingReader, int]] = []
        for made_at, folder in ring.held_since(self._seen):
            self._seen = made_at
            try:
                reader = RecordingReader(folder)
            except RecordingError:  # it is being written, or has made room: others are there
                continue
            new += [(reader, sequence) for sequence in range(reader.num_sequences)]
        self._waiting += new[-MOST_HELD:]

    def see_next(self) -> None:
        """One request more, drafted for by both."""
        reader, sequence = self._waiting.popleft()
        record, columns = reader.record(sequence), tap_columns(reader, self._candidate.tap_layers)
        pair: list[Drafted | None] = [
            draft_in_shadow(self._family, head, record, self._chain, columns)
            for head in (self._candidate, self._served)
        ]
        new, old = pair
        if new is not None and old is not None:
            self.gate.see(new, old)


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
