"""Checks that an engine's captured rounds produce the tokens of eager rounds; disables replay if the tokens differ."""

import logging

from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.engine_checks.bounded_step import bounded_step
from wingbeat.runtime.engine_checks.self_test import NUM_TEXTS
from wingbeat.runtime.engine_checks.trial_prompts import trial_requests
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LIMIT_S = 120.0
_NUM_TEXTS, _NUM_TOKENS = 2, 12
"""Number of greedy texts, and of sampled texts, that are generated one at a time; and number of tokens of each text."""


def check_graphs(engine: Engine, tokenizer: Tokenizer | None) -> str | None:
    """Generates short texts with and without graphs: first each text alone, then all texts together.

    Rounds with and without graphs have the same shapes and kernels, so both must produce the same tokens. The engine is
    reset afterwards.

    Args:
        engine: engine without running requests and without a drafter.

    Returns:
        A line of text if the tokens differ, in which case graphs stay unused; None if the tokens agree or nothing is
        captured.

    Raises:
        StepTimeout: a replay hangs.
    """
    graphs = engine.runner.graphs
    if graphs is None or not graphs.stats.captured:
        return None
    texts = trial_requests(engine.loaded, tokenizer, NUM_TEXTS, _NUM_TOKENS, engine.config.max_model_len)
    greedy = [request for request in texts if not request.params.temperature]
    sampled = [request for request in texts if request.params.temperature]
    requests = greedy[:_NUM_TEXTS] + sampled[:_NUM_TEXTS]

    def both() -> tuple[list[list[int]], list[list[int]]]:
        written, builder = [], engine.runner.builder
        for graphs.pool.paused in (True, False):
            written.append([])
            for builder.may_be_lean in (False, True) if True in graphs.variants else (True,):
                written[-1] += [_write(engine, [request]) for request in requests]
                engine.forget()  # clears the prefix cache, so that prompts are computed again
                written[-1].append(_write(engine, requests))
                engine.forget()
        return written[0], written[1]

    eager, replayed = bounded_step("replaying CUDA graphs", LIMIT_S, "start with --no-cuda-graphs", both)
    if eager == replayed:
        return None
    graphs.pool.paused = True
    index = next(i for i, (mine, its) in enumerate(zip(eager, replayed, strict=True)) if mine != its)
    line = (
        f"captured CUDA graphs write {replayed[index]} where the same rounds write {eager[index]} eagerly: no graph is "
        "replayed, which is slower (--no-cuda-graphs is as fast, and starts sooner)"
    )
    logger.warning("%s", line)
    return line


def _write(engine: Engine, requests: list[Request]) -> list[int]:
    """Returns the tokens of all requests.

    A request is added for each output of earlier requests, so that prompts run beside decodes.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    left = iter(requests)
    engine.add_request(next(left))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            if (request := next(left, None)) is not None:
                engine.add_request(request)
    return [token for written in tokens.values() for token in written]
