"""Thousands of requests, most of them wrong: every answer is one that docs/http_api.md allows, and nobody else notices.

A failure names its seed and index; `--hostile-replay SEED:INDEX` sends that request alone.
"""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from .answers import Told, Wrong, check, demand
from .bystander import bystanders
from .case import Case
from .client import Address, send
from .generator import draw
from .oracle import Verdict, judge

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

CONCURRENCY = 8
TWIN_SHARE = 5
"""A generation in so many is repeated without speculation and stream."""
MAX_REPORTED = 20


async def try_one(address: Address, tokenizer: Any, case: Case, with_twin: bool) -> int:
    """Send a request and check what comes; the answer's status.

    Raises:
        Wrong: the document does not allow the answer.
    """
    verdict = judge(case, tokenizer)
    answer = await send(address, case)
    demand(not answer.hung, "no answer within the time limit")
    demand(answer.status != 0, f"closed without an answer: {answer.body[:200]!r}")
    demand(answer.status < 500 or answer.status == 503, f"status {answer.status}: {answer.body[:300]!r}")
    told = check(case, verdict, answer)
    if told is not None and with_twin:
        await check_twin(address, tokenizer, case, verdict, told)
    return answer.status


async def check_twin(address: Address, tokenizer: Any, case: Case, verdict: Verdict, told: Told) -> None:
    """A repetition without speculation and stream has equal texts, whatever its seed if the request is greedy."""
    fields = {**verdict.body, "speculation": {"enabled": False}, "stream": False, "stream_options": None}
    temperature = fields.get("temperature")
    greedy = temperature is not None and temperature < 1e-5
    fields |= {"temperature": 0, "seed": 12345} if greedy else {"seed": told.seed}
    twin = replace(case, body=json.dumps(fields).encode())
    answer = await send(address, twin)
    plain = check(twin, judge(twin, tokenizer), answer)
    demand(plain is not None, f"the same request, plain, is answered by {answer.status}: {answer.body[:300]!r}")
    demand(plain.texts == told.texts, f"plain decoding writes {plain.texts}, not {told.texts}")


async def bombard(address: Address, tokenizer: Any, seed: int, count: int) -> tuple[Counter[int], list[str]]:
    """The statuses of `count` requests, and what was wrong with those that were."""
    statuses: Counter[int] = Counter()
    wrong: list[str] = []
    indices = iter(range(count))

    async def keep_sending() -> None:
        for index in indices:
            case = draw(seed, index)
            try:
                statuses[await try_one(address, tokenizer, case, index % TWIN_SHARE == 0)] += 1
            except Wrong as problem:
                wrong.append(
                    f"{seed}:{index} {problem}\n    {case.method} {case.target[:200]} {case.headers}\n    "
                    f"{(case.body or b'')[:600]!r}"
                )

    async with bystanders(address):
        await asyncio.gather(*(keep_sending() for _ in range(CONCURRENCY)))
    return statuses, wrong


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(1, 1000, id="1000", marks=pytest.mark.slow),
        pytest.param(2, 20_000, id="20000", marks=pytest.mark.soak),
    ],
)
def test_every_answer_is_one_that_the_document_allows(address, demo_app, tokenizer, seed, count):
    statuses, wrong = asyncio.run(bombard(address, tokenizer, seed, count))
    assert not wrong, f"{len(wrong)} of {count} answers are wrong, such as\n" + "\n".join(wrong[:MAX_REPORTED])
    assert statuses[200] > count / 8, f"too few requests were served to say anything: {statuses}"
    assert statuses[503] <= count / 100, f"too many requests met a busy server: {statuses}"
    demo_app.check_integrity()


def test_a_request_of_the_fuzzer_can_be_sent_alone(address, tokenizer, request):
    seed, index = map(int, (request.config.getoption("--hostile-replay", None) or "1:0").split(":"))
    case = draw(seed, index)
    assert case == draw(seed, index)
    asyncio.run(try_one(address, tokenizer, case, with_twin=True))
