"""Learner process: trains a head while the machine is not busy, tests candidates on recorded rounds, and promotes
better candidates.

The learner communicates through files alone: rounds come from a ring on disk, heads go to a ledger, and its status is a
file. A learner that was killed continues from its last checkpoint when it is started again.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from wingbeat.runtime.learning.candidate_test import CandidateTest
from wingbeat.runtime.learning.gate import Verdict
from wingbeat.runtime.learning.head_versions import FIGURES_FILE, HeadLedger
from wingbeat.runtime.learning.heads import load_head
from wingbeat.runtime.learning.ledger import Ledger, LedgerError
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.learning.trainer import OnlineTrainer
from wingbeat.runtime.recordings.format import RecordingError, write_atomically
from wingbeat.runtime.recordings.ring import RoundRing
from wingbeat.runtime.training.family import TrainedHead

logger = logging.getLogger(__name__)
CANDIDATE = "candidate"
PAUSE_S = 1.0
REPLACED_AFTER = 4
"""Maximum length of a test without a verdict, in multiples of `candidate_steps` training steps. Then the test ends, so
that a newer candidate is tested.
"""


class Learner:
    """The learner of one ledger.

    Args:
        load: function that returns the load average of the machine, such as `os.getloadavg()[0]`.
        worked: function that returns the CPU seconds that this process has used.
    """

    def __init__(
        self,
        settings: LearnerSettings,
        load: Callable[[], float] = lambda: os.getloadavg()[0],
        clock: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.process_time,
    ) -> None:
        self.settings = settings
        self.ledger = HeadLedger(settings.root, settings.configured_head, settings.verifier_name)
        self.ring = RoundRing(settings.rounds, settings.max_bytes, settings.expire_s)
        self.trainer = OnlineTrainer(settings)
        self._load, self._clock, self._worked = load, clock, worked
        self._served: tuple[int, TrainedHead] | None = None
        self._base = 0
        """Version from which training started: the version that was served at that time."""
        self._test: CandidateTest | None = None
        self._tested_at = 0
        """Training step at which the last candidate was exported."""
        self._looked_at = self._saved_at = -float("inf")
        self._forgotten_at = self.ring.forgotten_at
        self.state = "waiting for rounds"

    def run(self) -> None:
        """Runs the learner until the process ends."""
        self.resume()
        while True:
            time.sleep(self.turn())

    def resume(self) -> None:
        """Continues from the last checkpoint, if its base version is still served.

        Otherwise starts from the served version.
        """
        try:
            base = self.trainer.resume()
        except Exception as error:  # any exception, because the content of the file is arbitrary
            logger.error("the checkpoint of the learner cannot be read: %s", error)
            base = None
        if base is not None and self._goes_on_from(base, self.ledger.read()):
            logger.info("the learner continues at step %d, from version %d", self.trainer.state.step, base)
            self._base, self._tested_at = base, self.trainer.state.step
        else:
            self._restart()

    @staticmethod
    def _goes_on_from(base: int, ledger: Ledger) -> bool:
        """Whether training that started from a base version is still useful, which it is if the base is the served or
        the settled version.

        A served version that no drafter runs yet may still be refused, so training from the settled version continues
        until a drafter runs the served version.
        """
        return base in (ledger.served, ledger.settled)

    def turn(self) -> float:
        """Runs one training step or one part of a test; returns the number of seconds to sleep afterwards."""
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
            logger.info("a shard was removed while it was read: %s", error)
            self.trainer.refresh()
        except FloatingPointError as error:
            self._start_over(str(error))
        # To use only a share of a core, w CPU seconds are spread over w / share seconds of wall time. That time
        # includes time in which other processes used the core.
        return max(0.0, (self._worked() - worked) / self.settings.core_share - (self._clock() - began))

    def _advance(self) -> None:
        steps = self.trainer.state.step
        verdict, why = (Verdict.OPEN, "") if self._test is None else self._test.gate.decide()
        if verdict is not Verdict.OPEN and self._is_settled():
            self._conclude(verdict, why)
        elif verdict is Verdict.OPEN and self._test is not None and not self._test.done:
            self.state = "testing a candidate"
            self._test.see_next()
        elif self._test is None and steps - self._tested_at >= self.settings.candidate_steps and self._may_test():
            self._begin_test()
        elif self._test is not None and steps - self._tested_at >= REPLACED_AFTER * self.settings.candidate_steps:
            self._end_test("a newer candidate takes its place")
        else:
            self.state = "training"
            self.trainer.step()
            del self.trainer.state.losses[:-100]

    def _is_settled(self) -> bool:
        """Whether a drafter runs the served version. Only then can a candidate that was better than that version be
        promoted.
        """
        ledger = self.ledger.read()
        return ledger.settled == ledger.served

    def _may_test(self) -> bool:
        held = self.trainer.held
        return held is not None and held.num_sequences >= self.settings.least_held

    def _has_enough(self) -> bool:
        source = self.trainer.source
        return source is not None and source.num_tokens >= self.settings.least_tokens

    def _look(self) -> None:
        """Updates the ring, the served version and the status, and writes a checkpoint from time to time."""
        self._looked_at = self._clock()
        kept = self.ring.tidy()
        self.trainer.refresh()
        ledger = self.ledger.read()
        if not self._goes_on_from(self._base, ledger):
            logger.info("version %d is served in place of %d", ledger.served, self._base)
            self._restart()
        if self._test is not None and self.ring.forgotten_at != self._forgotten_at:
            self._end_test("the verifier has other weights")
        self._forgotten_at = self.ring.forgotten_at
        if self._test is not None:
            self._test.renew()
        if self._clock() - self._saved_at >= self.settings.checkpoint_s:
            self._save()
        self._say(kept._asdict())

    def _save(self) -> None:
        self._saved_at = self._clock()
        self.trainer.save(self._base)

    def _restart(self) -> None:
        """Restarts training from the served version, and writes a checkpoint, so that discarded state does not come
        back after a kill.
        """
        self._base, folder = self._served_folder()
        logger.info("the learner starts from version %d", self._base)
        self.trainer.restart(folder)
        self._test, self._tested_at = None, 0
        self._save()

    def _served_folder(self) -> tuple[int, Path]:
        """Number and folder of the served version. Versions whose files are damaged are marked as refused."""
        while True:
            number = self.ledger.read().served
            try:
                return number, self.ledger.checked_folder(number)
            except LedgerError as error:
                self.ledger.refuse(number, str(error))

    def _start_over(self, reason: str) -> None:
        self.ledger.reject(f"training diverged: {reason}")
        self.trainer.change_pace(better=False)
        self._restart()

    def _begin_test(self) -> None:
        """Exports the trained head and loads it as drafters do, so that the test measures what would be served."""
        folder = self.settings.work / CANDIDATE
        shutil.rmtree(folder, ignore_errors=True)
        self.trainer.export(folder)
        candidate = load_head(folder, self.trainer.target).eval()
        against, folder = self._served_folder()
        if self._served is None or self._served[0] != against:
            self._served = against, load_head(folder, self.trainer.target).eval()
        number, heads = self.ledger.count_test(), (candidate, self._served[1])
        self._test = CandidateTest(number, self.settings.margin, against, heads, self.trainer, self.ring)
        self._tested_at = self.trainer.state.step
        logger.info("candidate %d, after step %d, is tested against version %d", number, self._tested_at, against)

    def _conclude(self, verdict: Verdict, why: str) -> None:
        self.trainer.change_pace(better=verdict is Verdict.BETTER)
        if verdict is not Verdict.BETTER:
            self._end_test(why)
            return
        number = self.ledger.add(partial(_copy, self.settings.work / CANDIDATE), "learner", why)
        if self.ledger.promote(number, why, over=self._test.against):
            logger.info("version %d of the head is promoted: %s", number, why)
            self._base = number
        else:
            # The version with which the candidate was compared is no longer served, for example after a promotion by an
            # operator.
            logger.info(
                "version %d of the head is not promoted: it was tested against version %d, no longer served",
                number,
                self._test.against,
            )
        self._test = None
        self._save()

    def _end_test(self, why: str) -> None:
        gate = self._test.gate
        self.ledger.reject(f"candidate {gate.number}: {why}")
        logger.info("candidate %d is rejected: %s", gate.number, why)
        self._test = None

    def _say(self, kept: dict[str, int]) -> None:
        """Writes the learner's figures to its status file."""
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


def _copy(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
