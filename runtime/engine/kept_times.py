"""The verifier's times on disk, held against what real passes take: the next start does not read a bad minute."""

import logging
import statistics
from pathlib import Path

import numpy as np

from wingbeat.kernels.disk_cache import keep
from wingbeat.runtime.engine.calibration import VerifierTimes, levelled
from wingbeat.runtime.speculation.costs import between_powers, power_of

logger = logging.getLogger(__name__)

_EVERY = 4
"""Rounds: one of so many is looked at."""
_WINDOW = 16
"""Passes whose median is believed."""
_CONTRADICTION = 1.2
"""Times the kept seconds, or as much below: what lies between is how minutes differ."""


class _Passes:
    """Real seconds over the table's, of passes of about so many rows: the least median of any window."""

    def __init__(self) -> None:
        self.value: float | None = None
        """None until a window is full."""
        self._window: list[float] = []

    def observe(self, ratio: float) -> None:
        """One more pass."""
        self._window.append(ratio)
        if len(self._window) == _WINDOW:
            median = statistics.median(self._window)
            self.value = median if self.value is None else min(self.value, median)
            self._window.clear()


class KeptTimes:
    """Watches the passes of an engine on the host, and corrects the file that its times came from or went to.

    A start reads that file in place of measuring. Of the windows of passes the quickest counts, as it does of the
    passes that are measured: what else runs makes passes longer and never shorter.

    Args:
        path: of the file; one that is not there, as a disturbed measurement is not kept, stays away.
        times: that the engine works with.
    """

    def __init__(self, path: Path, times: VerifierTimes) -> None:
        self._path, self._times = path, times
        self._passes: dict[int, _Passes] = {}
        """By power of two of the rows."""
        self._written: dict[int, float] = {}
        """Likewise: what the file says now over `times`."""
        self._num_rounds = 0

    def wants(self) -> bool:
        """Whether this round's pass is to be observed; asked once of every round without prompts."""
        self._num_rounds += 1
        return self._num_rounds % _EVERY == 0

    def observe(self, seconds: float, table_s: float, rows: int) -> None:
        """Note a pass of so many rows that takes `table_s` by the engine's times; rewrites the file where it must."""
        self._passes.setdefault(power_of(rows), _Passes()).observe(seconds / table_s)
        found = {power: passes.value for power, passes in self._passes.items() if passes.value is not None}
        said = between_powers(self._written, 2.0 ** np.array(list(found)))
        ratios = np.array(list(found.values())) / said
        if ((ratios > _CONTRADICTION) | (ratios < 1 / _CONTRADICTION)).any():
            self._rewrite(found)

    def _rewrite(self, found: dict[int, float]) -> None:
        self._written = found
        if not self._path.is_file():
            return
        sizes, extra, verify_s, context_s = self._times
        roots = np.array(sizes, dtype=np.float64)
        scale = between_powers(found, roots[:, None] * (1.0 + np.array(extra)))
        rows = tuple(map(tuple, (np.array(verify_s) * scale).tolist()))
        context = tuple((np.array(context_s) * between_powers(found, roots)).tolist())
        keep(self._path, VerifierTimes(sizes, extra, levelled(rows), context)._asdict())
        said = ", ".join(f"{2**power}: {value:.2f}" for power, value in sorted(found.items()))
        logger.info("passes take other times than %s says: corrected by the factors (by rows) %s", self._path, said)
