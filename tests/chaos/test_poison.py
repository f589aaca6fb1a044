"""A request that kills the process of every engine that runs it, in a real application."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.fakes import DEADLY

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
NUM_REPLICAS = 2
NUM_BYSTANDERS = 6
NUM_TOKENS = 900
"""At a hundred a second: they are there for all deaths."""


def test_what_kills_three_engines_is_answered_by_500_and_others_on_them_are_answered(start_app, until):
    settings = {"engine_factory": "tests.fakes:build_deadly_engine", "drafter": "none", "max_model_len": 1000}
    with start_app("deadly", num_replicas=NUM_REPLICAS, **settings) as app:
        fields = {"max_tokens": NUM_TOKENS, "seed": 7}
        prompts = [[1, 2, 3, index] for index in range(NUM_BYSTANDERS)]
        with ThreadPoolExecutor(NUM_BYSTANDERS) as threads:
            expected = list(threads.map(lambda prompt: app.text(prompt, **fields), prompts))
            running = [threads.submit(app.text, prompt, **fields) for prompt in prompts]
            until(lambda: all(engine["num_requests"] for engine in app.engines().values()))
            with pytest.raises(openai.InternalServerError) as failed:
                app.complete([DEADLY, 1, 2], max_tokens=10)
            assert failed.value.status_code == 500
            assert failed.value.body["code"] == "internal_error"
            assert [one.result() for one in running] == expected
        until(lambda: app.http.get("/health").status_code == 200)
        assert sum(engine["num_engine_restarts"] for engine in app.engines().values()) == 3
        assert app.text(prompts[0], **fields) == expected[0]
