"""Speculation with fixed trees until the first drafter's costs are measured, and adaptive speculation from then on."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import cast

import numpy as np

from wingbeat.runtime.adaptive.adaptive_speculation import AdaptiveSpeculation
from wingbeat.runtime.adaptive.calibration import draft_curve, pass_curve
from wingbeat.runtime.adaptive.curves import RoundCosts
from wingbeat.runtime.adaptive.policy import HOLD, SpeculationPolicy
from wingbeat.runtime.adaptive.pruning import DevicePruner
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.engine.speculation import DraftPlan, PolicyStats, Speculation, Trees
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.protocol.ends import VerifierEnd
from wingbeat.runtime.protocol.messages import Outcome
from wingbeat.runtime.round.flight import RoundInFlight, RoundResult
from wingbeat.runtime.round.runner import ModelRunner
from wingbeat.runtime.round.shapes import node_buckets
from wingbeat.runtime.scheduling.sequence import Sequence
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel

logger = logging.getLogger(__name__)


class MeasuredSpeculation(Speculation):
    """Speculation with fixed trees until `calibrate` has measured the costs of rounds; adaptive from then on.

    Args:
        loaded, runner: the verifier and the runner whose costs are measured.
    """

    plan_every = HOLD

    def __init__(self, loaded: LoadedModel, runner: ModelRunner, config: EngineConfig) -> None:
        self._loaded, self._runner = loaded, runner
        self._adaptive = first_result("host_speculation", runner) or AdaptiveSpeculation
        self._config = config
        self._fixed = Speculation(config.speculation.max_path - 1)
        self.current: Speculation = self._fixed
        """Speculation that currently decides."""

    def calibrate(self, end: VerifierEnd, patience_s: float) -> None:
        """Measures the costs of rounds, if they have not been measured.

        Trees stay fixed if the drafter does not answer.
        """
        if self.current is self._fixed:
            self.current = self._measured(end, patience_s) or self._fixed
        self.current.calibrate(end, patience_s)

    @contextmanager
    def fixed(self) -> Iterator[None]:
        """See `Speculation.fixed`."""
        current, self.current = self.current, self._fixed
        try:
            with super().fixed():
                yield
        finally:
            self.current = current

    def plan(
        self, running: list[Sequence], proposals: list[Sequence], num_unfollowed: int = 0, num_rounds: int = 1
    ) -> DraftPlan:
        """Delegates to `current`, as do all methods below."""
        return self.current.plan(running, proposals, num_unfollowed, num_rounds)

    def made_of_text(self) -> DraftPlan:
        return self.current.made_of_text()

    def text_table(self) -> np.ndarray | None:
        return self.current.text_table()

    @property
    def text_pays(self) -> bool:
        return self.current.text_pays

    @property
    def is_probing(self) -> bool:
        return self.current.is_probing

    def text_prices(self, running: list[Sequence], most: int) -> np.ndarray | None:
        return self.current.text_prices(running, most)

    def slow_down(self, running: list[Sequence], num_drafting: int) -> float | None:
        return self.current.slow_down(running, num_drafting)

    def may_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        return self.current.may_follow(unfollowed)

    def to_follow(self, unfollowed: list[Sequence]) -> list[Sequence]:
        return self.current.to_follow(unfollowed)

    def follows_next(self) -> bool:
        return self.current.follows_next()

    def write_rule(self, plan: DraftPlan, outcome: Outcome, num_context_tokens: int) -> int:
        return self.current.write_rule(plan, outcome, num_context_tokens)

    @property
    def num_nodes(self) -> int | None:
        return self.current.num_nodes

    def prune(self, trees: Trees, decodes: list[Sequence], drafted: Trees) -> Trees:
        return self.current.prune(trees, decodes, drafted)

    def launched(self, flight: RoundInFlight) -> None:
        self.current.launched(flight)

    def settled(self, flight: RoundInFlight, result: RoundResult) -> None:
        self.current.settled(flight, result)

    def abandoned(self) -> None:
        self.current.abandoned()

    def stats(self) -> PolicyStats | None:
        return self.current.stats()

    def _measured(self, end: VerifierEnd, patience_s: float) -> AdaptiveSpeculation | None:
        runner, config = self._runner, self._config
        graphs = runner.graphs if self._loaded.device.type == "cuda" else None
        device = graphs.pool.device if graphs is not None and graphs.stats.captured else None
        started = time.perf_counter()
        drafts = draft_curve(end, config, patience_s)
        if drafts is None:
            logger.warning("the drafter did not answer the calibration: speculating with fixed trees")
            return None
        passes = pass_curve(runner.model, runner.cache, config, device)
        logger.info(
            "measured in %.1f s: passes of %s rows take %s ms, drafts for %s requests %s ms and %s ms for each level",
            time.perf_counter() - started,
            _listed(passes.rows, 1),
            _listed(passes.short_s, 1e3),
            _listed(drafts.num_reqs, 1),
            _listed(drafts.base_s, 1e3),
            _listed(drafts.level_s, 1e3),
        )
        shape, widths = config.speculation, node_buckets(config) if self._adaptive.fixed_widths else None
        policy = SpeculationPolicy(RoundCosts(passes, drafts), shape.max_path - 1, shape.num_nodes, widths)
        return self._adaptive(policy, cast("DevicePruner | None", runner.pruner))


def _listed(values: Iterable[float], factor: float) -> str:
    return " / ".join(f"{value * factor:.3g}" for value in values)
