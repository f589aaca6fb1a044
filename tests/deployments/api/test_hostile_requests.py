"""The fuzzer's requests against the HTTP application alone, with a scripted pool: each answer is one of the document's.

`tests/hostile` sends them to the whole application.
"""

import asyncio
from collections import Counter

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import TOKENIZER, FakePool, app_for
from tests.deployments.metrics.engine_figures import Engines, engine_stats
from tests.hostile.answers import Wrong, check
from tests.hostile.asgi import call
from tests.hostile.contract import CONTEXT, KEY, MODEL, VOCAB_SIZE
from tests.hostile.generator import draw
from tests.hostile.oracle import judge
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import Request

MAX_REPORTED = 20


def script(request: Request) -> str:
    """Text longer than requested; greedy text does not depend on the seed."""
    params = request.params
    seed = 0 if params.temperature < 1e-5 else params.seed
    return f"{seed} after {len(request.prompt_token_ids)} " * params.max_tokens


class PlainOrSpeculative(FakePool):
    """A pool that reports no drafts for requests without speculation."""

    async def generate(self, request: Request, session_id: str = ""):
        async for output in super().generate(request):
            plain = output.metrics is not None and not request.params.speculation
            yield output._replace(metrics=SpeculationMetrics()) if plain else output


async def bombard(seed: int, count: int) -> tuple[Counter[int], list[str]]:
    """Statuses of `count` requests, and descriptions of wrong answers."""
    pool = PlainOrSpeculative(script)
    pool.info = ModelInfo(MODEL, max_model_len=CONTEXT, vocab_size=VOCAB_SIZE, drafter="fake")
    monitor = Engines(a=engine_stats()).monitor()
    app = app_for(pool, access=Access.of_server("127.0.0.1", api_keys=[SecretStr(KEY)]), monitor=monitor)
    statuses: Counter[int] = Counter()
    wrong = []
    for index in range(count):
        case = draw(seed, index)
        answer = await asyncio.wait_for(call(app, case), timeout=60)
        statuses[answer.status] += 1
        try:
            check(case, judge(case, TOKENIZER), answer)
        except Wrong as problem:
            wrong.append(
                f"{seed}:{index} {problem}\n    {case.method} {case.target[:200]} {case.headers}\n"
                f"    {(case.body or b'')[:600]!r}"
            )
        assert not pool.running, f"{seed}:{index} left a request behind"
    return statuses, wrong


@pytest.mark.parametrize(
    ("seed", "count"), [pytest.param(3, 400, id="400"), pytest.param(4, 20_000, id="20000", marks=pytest.mark.slow)]
)
def test_every_answer_is_one_that_the_document_allows(seed, count):
    statuses, wrong = asyncio.run(bombard(seed, count))
    assert not wrong, f"{len(wrong)} of {count} answers are wrong, such as\n" + "\n".join(wrong[:MAX_REPORTED])
    assert statuses[200] > count / 8, f"too few requests were served to say anything: {statuses}"
