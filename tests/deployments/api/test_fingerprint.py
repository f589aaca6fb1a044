"""`system_fingerprint`: which weights wrote an answer."""

import json

import pytest

from tests.deployments.http_world import FakePool, call
from tests.deployments.tool_world import USER

BODIES = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
}


def told(pool: FakePool, path: str, **more) -> set[str]:
    """Fingerprints in an answer, or in all chunks of a stream."""
    answer = call(pool, path, BODIES[path] | more)
    if not more.get("stream"):
        return {answer.json()["system_fingerprint"]}
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return {json.loads(line)["system_fingerprint"] for line in lines if line != "[DONE]"}


@pytest.mark.parametrize("path", BODIES)
def test_answers_and_chunks_say_which_weights_wrote_them(path: str):
    pool = FakePool()
    (before,) = told(pool, path)
    assert before.startswith("fp_")
    assert told(pool, path, stream=True, stream_options={"include_usage": True}) == {before}
    assert told(pool, path, n=2) == told(pool, path, speculation={"enabled": False}) == {before}
    pool.weights_digest = "d1"
    (after,) = told(pool, path)
    assert after != before
    assert told(pool, path, stream=True) == {after}
