"""Tests whether a drafter suits its verifier, by generating short texts with the real engine and channel at start.

A head that is interpreted with a wrong convention, or that belongs to another verifier, costs speed but never changes
tokens, so only the head's low acceptance reveals the mistake. The test does not depend on checkpoints and processes.
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from wingbeat.runtime.engine.drafter_client import DrafterState
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.engine_checks.trial_prompts import trial_requests
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_TEXTS = 32
"""Maximum number of texts of a test; a clear result needs only a few texts."""
LEAST_ACCEPTANCE = 0.3
"""Minimum acceptance rate of the first drafted tokens. Published heads reach 0.7 and more; a head whose taps are off by
one layer reaches about 0.1."""
_NUM_TOKENS, _FEWER_TOKENS = 24, 8
"""Number of tokens per text. The smaller number is used if few sequences run at once, because otherwise the start would
take seconds longer."""
_MANY_AT_ONCE = 8
_NUM_TURNS = 4
"""Maximum number of turns in which texts are generated; a turn is skipped once the result is clear."""
_CLEAR = 4.0
"""Number of standard errors between acceptance and `LEAST_ACCEPTANCE` at which the result is clear."""


class BadDrafterError(ValueError):
    """The drafter's tokens are hardly ever accepted.

    The message is one line with the rate, and with the way to use the drafter nevertheless.
    """


class SelfTest(NamedTuple):
    """Result of a self-test."""

    num_texts: int
    num_tokens: int
    elapsed_s: float
    metrics: SpeculationMetrics

    @property
    def first_position(self) -> float:
        """Fraction of the verified trees in which a node at depth 1 was accepted."""
        rates = self.metrics.acceptance_rate_per_pos()
        return rates[0] if rates else 0.0

    @property
    def is_clear(self) -> bool:
        """Whether the result is so clear that more texts are unlikely to change the verdict."""
        num_drafts = self.metrics.num_drafts
        # A fraction measured on n drafts has a standard error of at most 0.5 / sqrt(n).
        return num_drafts > 0 and abs(self.first_position - LEAST_ACCEPTANCE) > _CLEAR * 0.5 / num_drafts**0.5

    @property
    def passed(self) -> bool:
        """Whether the drafter's acceptance is sufficient."""
        return self.first_position >= LEAST_ACCEPTANCE

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as JSON-compatible fields."""
        return {
            "num_texts": self.num_texts,
            "num_tokens": self.num_tokens,
            "elapsed_s": round(self.elapsed_s, 3),
            "num_drafts": self.metrics.num_drafts,
            "first_position": round(self.first_position, 4),
            "acceptance_rate_per_pos": [round(rate, 4) for rate in self.metrics.acceptance_rate_per_pos()],
            "acceptance_length": round(self.metrics.acceptance_length, 4),
            "passed": self.passed,
        }


def drafter_check(tokenizer: Tokenizer | None, name: str, allow_bad: bool) -> Callable[[Engine], SelfTest]:
    """Returns `check_drafter` for these arguments."""
    return partial(check_drafter, tokenizer=tokenizer, name=name, allow_bad=allow_bad)


def check_drafter(engine: Engine, tokenizer: Tokenizer | None, name: str, allow_bad: bool = False) -> SelfTest:
    """Runs the self-test and judges its result.

    Args:
        engine: engine without running requests and with its drafter attached.
        name: the drafter's name in messages.
        allow_bad: whether a failed test only logs a warning.

    Raises:
        BadDrafterError: first-position acceptance is below `LEAST_ACCEPTANCE`, or the drafter was lost during the test.
    """
    test = run_self_test(engine, tokenizer)
    if engine.drafter_state is not DrafterState.ATTACHED:
        raise BadDrafterError(f"drafter {name} was lost during its self-test")
    length = f"{test.metrics.acceptance_length:.2f} tokens per draft"
    if test.passed:
        rates = " ".join(f"{rate:.2f}" for rate in test.metrics.acceptance_rate_per_pos())
        logger.info(
            "drafter %s: accepted %s by depth, %s, in a self-test of %.1f s", name, rates, length, test.elapsed_s
        )
        return test
    problem = (
        f"drafter {name} does not suit {engine.loaded.name}: first-position acceptance is {test.first_position:.2f} in "
        f"the self-test and should be {LEAST_ACCEPTANCE} at least"
    )
    if not allow_bad:
        raise BadDrafterError(f"{problem}; --allow-bad-drafter (allow_bad_drafter=true) serves with it anyway")
    logger.warning("%s; serving with it anyway, at %s", problem, length)
    return test


def run_self_test(engine: Engine, tokenizer: Tokenizer | None) -> SelfTest:
    """Generates short texts with drafts of the full configured shape, half of the texts greedily.

    The engine is reset afterwards, so that no cached prefix and no statistics remain.

    Args:
        engine: engine without running requests and with its drafter attached.
        tokenizer: tokenizer of the verifier, for realistic prompts; None uses prompts of random tokens.

    Raises:
        RuntimeError: the engine has unfinished requests.
    """
    if engine.has_unfinished_requests():
        raise RuntimeError("the self-test needs an idle engine")
    num_tokens = _NUM_TOKENS if engine.config.max_num_seqs >= _MANY_AT_ONCE else _FEWER_TOKENS
    requests = trial_requests(engine.loaded, tokenizer, NUM_TEXTS, num_tokens, engine.config.max_model_len)
    test, started = SelfTest(0, 0, 0.0, SpeculationMetrics()), time.perf_counter()
    # drafts have the fixed shape and waits for the drafter may be long, because the test is about acceptance, not
    # speed
    with engine.policy.fixed(), engine.drafting.waits.unbounded():
        for turn in range(_NUM_TURNS):
            texts = requests[turn::_NUM_TURNS]
            written = _write(engine, texts, test.metrics)
            elapsed_s = time.perf_counter() - started
            test = SelfTest(test.num_texts + len(texts), test.num_tokens + written, elapsed_s, test.metrics)
            if test.is_clear:
                break
    engine.forget()
    return test


def _write(engine: Engine, texts: list[Request], metrics: SpeculationMetrics) -> int:
    """Generates texts until all have ended, adds the texts' metrics to `metrics`, and returns the number of tokens."""
    num_tokens = 0
    for request in texts:
        engine.add_request(request)
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_tokens += len(output.token_ids)
            if output.metrics is not None:
                metrics.add(output.metrics)
    return num_tokens
