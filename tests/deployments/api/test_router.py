"""The HTTP surface over scripted engines: the shapes of responses, streams, and stop strings."""

import asyncio

import httpx
import pytest

from tests.deployments.http_world import TOKENIZER, URL, FakePool, byte_tokenizer, call, chat, chunks, complete
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app


class TestCompletions:
    def test_a_whole_response_has_text_usage_and_metrics(self):
        body = complete(FakePool("bonjour é")).json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [
            {
                "index": 0,
                "text": "bonjour é",
                "logprobs": None,
                "token_ids": None,
                "prompt_token_ids": None,
                "prompt_logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 11,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert body["metrics"]["speculative_decoding"]["acceptance_length"] == 2.5

    @pytest.mark.parametrize("tokens_per_output", [1, 2, 5, 100])
    def test_streamed_text_equals_whole_text(self, tokens_per_output):
        pool = FakePool("naïve 🦋 café", tokens_per_output)
        got = chunks(complete(pool, stream=True))
        assert "".join(chunk["choices"][0]["text"] for chunk in got) == "naïve 🦋 café"
        assert [chunk["choices"][0]["finish_reason"] for chunk in got] == [None] * (len(got) - 1) + ["stop"]
        assert ["metrics" in chunk for chunk in got] == [False] * (len(got) - 1) + [True]
        assert "usage" not in got[0]

    def test_a_usage_chunk_comes_last_when_asked_for(self):
        *others, last = chunks(complete(FakePool(), stream=True, stream_options={"include_usage": True}))
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in others)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        assert last["metrics"]["speculative_decoding"]["num_drafts"] == 2

    def test_usage_so_far_comes_with_every_chunk_when_asked_for(self):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *others, before, last = chunks(complete(FakePool(), stream=True, stream_options=options))
        counts = [chunk["usage"]["completion_tokens"] for chunk in [*others, before]]
        assert counts == sorted(set(counts))
        assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in others)
        assert "prompt_tokens_details" not in others[0]["usage"]
        assert (last["choices"], last["usage"]) == ([], before["usage"])
        alone = chunks(complete(FakePool(), stream=True, stream_options={"continuous_usage_stats": True}))
        assert all("usage" not in chunk and chunk["choices"] for chunk in alone)

    def test_the_model_may_be_left_out(self):
        for body in ({"prompt": "hi"}, {"prompt": "hi", "model": None}):
            assert call(FakePool(), "/v1/completions", body).json()["model"] == "demo"

    @pytest.mark.parametrize(("asked", "passed"), [(-1, 0), (0, 0), (256, 256), (257, 0), (2**31 - 1, 0)])
    def test_a_top_k_of_the_whole_vocabulary_filters_nothing(self, asked, passed):
        pool = FakePool()
        complete(pool, top_k=asked)
        assert pool.requests[0].params.top_k == passed

    @pytest.mark.parametrize("temperature", [1e-45, 3e-38, 9.9e-6])
    def test_temperatures_too_small_to_divide_by_are_greedy(self, temperature):
        pool = FakePool()
        complete(pool, temperature=temperature)
        assert pool.requests[0].params.temperature == 0

    def test_fields_reach_the_engine(self):
        pool = FakePool()
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "ignore_eos": True}
        complete(pool, **sampling, speculation={"enabled": False})
        params = pool.requests[0].params
        assert {name: getattr(params, name) for name in sampling} == sampling
        assert (params.speculation, params.max_tokens) == (False, 40)

    def test_defaults_are_openais(self):
        pool = FakePool()
        call(pool, "/v1/completions", {"model": "demo", "prompt": "hi", "top_k": -1, "temperature": None})
        params = pool.requests[0].params
        assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
        assert params.speculation
        assert not params.ignore_eos

    def test_the_seed_comes_back_and_counts_up_over_choices(self):
        pool = FakePool()
        assert complete(pool, n=3, seed=7).json()["seed"] == 7
        assert [request.params.seed for request in pool.requests] == [7, 8, 9]
        drawn = complete(pool).json()["seed"]
        assert pool.requests[-1].params.seed == drawn
        assert 0 <= drawn < 2**53
        assert complete(pool).json()["seed"] != drawn

    def test_seeds_at_the_edge_wrap(self):
        pool = FakePool()
        complete(pool, n=2, seed=2**63 - 1)
        assert [request.params.seed for request in pool.requests] == [2**63 - 1, -(2**63)]

    @pytest.mark.parametrize("stream", [False, True])
    def test_prompts_times_n_give_choices_in_order(self, stream):
        pool = FakePool(lambda request: TOKENIZER.decode(request.prompt_token_ids) + str(request.params.seed))
        response = complete(pool, prompt=["a", "bb"], n=2, seed=1, stream=stream)
        texts = [""] * 4
        for body in chunks(response) if stream else [response.json()]:
            for choice in body["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["a1", "a2", "bb1", "bb2"]
        if not stream:
            assert response.json()["usage"]["prompt_tokens"] == 3
            assert response.json()["metrics"]["speculative_decoding"]["num_drafts"] == 8

    @pytest.mark.parametrize("prompt", ["né", TOKENIZER.encode("né")])
    @pytest.mark.parametrize("stream", [False, True])
    def test_echo_puts_the_prompt_first(self, prompt, stream):
        response = complete(FakePool("e"), prompt=prompt, echo=True, stream=stream)
        bodies = chunks(response) if stream else [response.json()]
        assert "".join(body["choices"][0]["text"] for body in bodies) == "née"

    def test_token_prompts_reach_the_engine_unchanged(self):
        pool = FakePool()
        complete(pool, prompt=[[5, 6], [0, 256]])
        assert [request.prompt_token_ids for request in pool.requests] == [(5, 6), (0, 256)]


class TestStopStrings:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
    def test_text_ends_before_the_stop_string_wherever_it_is_cut(self, stream, tokens_per_output):
        pool = FakePool("one ENtwo END three", tokens_per_output)
        response = complete(pool, stop=["END", "never"], stream=stream)
        bodies = chunks(response) if stream else [response.json()]
        assert "".join(body["choices"][0]["text"] for body in bodies) == "one ENtwo "
        assert bodies[-1]["choices"][0]["finish_reason"] == "stop"
        assert not pool.running
        if not stream:
            assert bodies[0]["usage"]["completion_tokens"] == len("one ENtwo END")

    def test_the_engine_is_told_to_end(self):
        pool = FakePool("a. b. c. d.")
        body = complete(pool, stop=".").json()
        assert len(pool.aborted) == 1
        assert body["metrics"]["speculative_decoding"] is None

    def test_metrics_stay_when_the_engine_was_done_anyway(self):
        pool = FakePool("a.", tokens_per_output=10)
        assert complete(pool, stop=".").json()["metrics"]["speculative_decoding"]["num_drafts"] == 2

    def test_other_choices_go_on(self):
        pool = FakePool(lambda request: "a. b" if request.params.seed == 1 else "longer text")
        choices = complete(pool, n=2, seed=1, stop=".").json()["choices"]
        assert [choice["text"] for choice in choices] == ["a", "longer text"]

    def test_text_held_back_at_the_end_is_sent(self):
        assert complete(FakePool("wait EN"), stop="END").json()["choices"][0]["text"] == "wait EN"


class TestChat:
    def test_a_whole_response_has_a_message(self):
        pool = FakePool()
        body = chat(pool).json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] | {"reasoning": None, "reasoning_content": None} == {
            "role": "assistant",
            "content": "hello world",
            "refusal": None,
            "reasoning": None,
            "reasoning_content": None,
        }
        assert {name: body[name] for name in ("prompt_logprobs", "prompt_token_ids")} == {
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }
        assert TOKENIZER.decode(pool.requests[0].prompt_token_ids) == "hi>"

    def test_without_a_limit_the_rest_of_the_context_is_used(self):
        pool = FakePool()
        chat(pool)
        assert pool.requests[0].params.max_tokens == 64 - 3

    def test_a_stream_begins_with_the_role_of_each_choice(self):
        got = chunks(chat(FakePool(), stream=True, n=2))
        for index in (0, 1):
            deltas = [choice["delta"] for chunk in got for choice in chunk["choices"] if choice["index"] == index]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
            assert deltas[-1] == {}
        assert ["metrics" in chunk for chunk in got] == [False] * (len(got) - 1) + [True]

    def test_a_model_without_template_says_so(self):
        tokenizer = byte_tokenizer()
        tokenizer.hugging_face.chat_template = None
        app = create_app(CompletionService(FakePool(), tokenizer))

        async def send():
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=URL) as client:
                body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
                return await client.post("/v1/chat/completions", json=body)

        response = asyncio.run(send())
        assert response.status_code == 400
        assert "no chat template" in response.json()["error"]["message"]
