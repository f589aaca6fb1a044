"""The `openai` client against the real application: everything a client of the OpenAI API relies on."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
MODEL = "wingbeat-demo"
PROMPT = "import os\nimport sys\n\n\ndef main(argv=None):\n    "
MESSAGES = [{"role": "user", "content": "Read a file and count its lines."}]
PLAIN = {"speculation": {"enabled": False}}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def tokenizer():
    from wingbeat.runtime.demo import demo_pair
    from wingbeat.runtime.tokenizer import Tokenizer

    return Tokenizer.load(demo_pair().verifier)


def chat(app, **fields):
    extra = {"ignore_eos": True, **fields.pop("extra", {})}
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 48, "temperature": 0, **fields}
    return app.client.chat.completions.create(**body, extra_body=extra)


def speculation(response) -> dict:
    return response.metrics["speculative_decoding"]


def texts_by_choice(chunks) -> list[str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return [texts[index] for index in sorted(texts)]


def test_a_completion_is_whole_and_was_speculated(demo_app, tokenizer):
    answer = demo_app.complete(PROMPT)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == 48
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 48
    metrics = speculation(answer)
    assert metrics["acceptance_length"] > 1
    assert metrics["num_drafts"] > 0
    assert metrics["num_accepted_tokens"] == sum(metrics["num_accepted_tokens_per_pos"])
    assert metrics["acceptance_length"] == pytest.approx(
        1 + metrics["num_accepted_tokens"] / metrics["num_drafts"], abs=1e-4
    )


def test_a_chat_completion_is_the_completion_of_its_template(demo_app, tokenizer):
    answer = chat(demo_app)
    message = answer.choices[0].message
    assert (answer.object, message.role) == ("chat.completion", "assistant")
    assert message.content == demo_app.text(list(tokenizer.encode_chat(MESSAGES)))
    assert speculation(answer)["num_drafts"] > 0
    assert answer.usage.completion_tokens == 48


@pytest.mark.slow
def test_content_parts_and_both_names_of_the_limit_are_understood(demo_app):
    parts = [{"role": "user", "content": [{"type": "text", "text": MESSAGES[0]["content"]}]}]
    answer = demo_app.client.chat.completions.create(
        model=MODEL, messages=parts, max_completion_tokens=48, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == chat(demo_app).choices[0].message.content


@pytest.mark.few(1)
@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_stream_says_what_the_whole_answer_says(demo_app, fields):
    chunks = list(demo_app.complete(PROMPT, stream=True, **fields))
    assert texts_by_choice(chunks) == [demo_app.text(PROMPT, **fields)]
    assert len(chunks) > 2
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert speculation(chunks[-1])["acceptance_length"] > 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_usage_and_metrics_when_asked(demo_app):
    *chunks, last = demo_app.complete(PROMPT, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    whole = demo_app.complete(PROMPT)
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name)
    assert speculation(last)["acceptance_length"] > 1
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.slow
def test_a_chat_stream_brings_the_role_then_the_text_then_the_reason(demo_app):
    chunks = list(chat(demo_app, stream=True, stream_options={"include_usage": True}))
    usage = chunks.pop()
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == chat(demo_app).choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert usage.usage.completion_tokens == 48
    assert speculation(usage)["num_drafts"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_speculation_off_writes_the_same_text_without_a_draft(demo_app, fields):
    fast = demo_app.complete(PROMPT, max_tokens=128, **fields)
    plain = demo_app.complete(PROMPT, max_tokens=128, extra=PLAIN, **fields)
    assert fast.choices[0].text == plain.choices[0].text
    assert speculation(fast)["num_drafts"] > 0
    assert speculation(plain)["num_drafts"] == 0
    assert speculation(plain)["num_draft_tokens"] == 0


def test_the_seed_in_the_answer_brings_the_answer_back(demo_app):
    drawn = demo_app.complete(PROMPT, temperature=1.0)
    again = demo_app.complete(PROMPT, temperature=1.0, seed=drawn.seed)
    assert again.choices[0].text == drawn.choices[0].text
    assert again.seed == drawn.seed
    assert demo_app.complete(PROMPT, temperature=1.0).seed != drawn.seed
    assert demo_app.text(PROMPT, temperature=1.0, seed=drawn.seed + 1) != drawn.choices[0].text


@pytest.mark.slow
def test_sixteen_concurrent_requests_of_different_lengths_each_get_their_own_answer(demo_app):
    def ask(index: int):
        prompt = f"class Thing{index}:\n" + f"    name_{index} = {index}\n" * index
        fields = {"max_tokens": 16 + 8 * index, "temperature": 0.8 * (index % 2), "seed": index}
        if index % 4 < 2:
            return demo_app.text(prompt, **fields)
        return texts_by_choice(demo_app.complete(prompt, stream=True, **fields))[0]

    with ThreadPoolExecutor(16) as threads:
        together = list(threads.map(ask, range(16)))
    assert [ask(index) for index in (0, 3, 6, 9, 15)] == [together[index] for index in (0, 3, 6, 9, 15)]
    assert len(set(together)) == 16


def test_three_choices_are_three_seeds(demo_app):
    answer = demo_app.complete(PROMPT, n=3, **SAMPLED)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    assert texts == [demo_app.text(PROMPT, **{**SAMPLED, "seed": 7 + index}) for index in range(3)]
    assert answer.usage.completion_tokens == 3 * 48
    assert texts_by_choice(demo_app.complete(PROMPT, n=3, stream=True, **SAMPLED)) == texts


@pytest.mark.slow
def test_three_chat_choices_stream_side_by_side(demo_app):
    whole = chat(demo_app, n=3, **SAMPLED)
    texts, roles = ["", "", ""], [0, 0, 0]
    for chunk in chat(demo_app, n=3, stream=True, **SAMPLED):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [1, 1, 1]


def test_prompts_in_a_list_and_as_token_ids_are_the_prompts_themselves(demo_app, tokenizer):
    prompts = [PROMPT, "class Stack:\n    "]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    texts = [demo_app.text(prompt) for prompt in prompts]
    for given in (prompts, ids):
        answer = demo_app.complete(given)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    assert demo_app.text(ids[0]) == texts[0]


def test_echo_puts_the_prompt_first(demo_app, tokenizer):
    text = demo_app.text(PROMPT)
    assert demo_app.text(PROMPT, echo=True) == PROMPT + text
    assert demo_app.text(tokenizer.encode(PROMPT), echo=True) == PROMPT + text
    assert texts_by_choice(demo_app.complete(PROMPT, echo=True, stream=True)) == [PROMPT + text]


@pytest.mark.slow
def test_stop_strings_across_chunk_borders_end_the_text_before_them(demo_app):
    pieces = [chunk.choices[0].text for chunk in demo_app.complete(PROMPT, stream=True)]
    text = "".join(pieces)
    borders = [len("".join(pieces[:index])) for index in range(1, len(pieces) - 1)]
    for border in borders[:: max(1, len(borders) // 5)]:
        stop = text[border - 2 : border + 2]
        until_stop = text[: text.index(stop)]
        whole = demo_app.complete(PROMPT, stop=[stop, "\0never"])
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (until_stop, "stop")
        chunks = list(demo_app.complete(PROMPT, stop=stop, stream=True))
        assert texts_by_choice(chunks) == [until_stop]
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert chat(demo_app, stop="\0never").choices[0].finish_reason == "length"


@pytest.mark.few(1)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_ends_its_requests_and_frees_their_blocks(demo_app, until, stream):
    before = demo_app.engine()
    fields = {"max_tokens": 2000, "n": 4, "temperature": 1.0, "stream": stream}
    if stream:
        with demo_app.complete(PROMPT, **fields) as chunks:
            next(iter(chunks))
            assert demo_app.engine()["num_requests"] == 4
    else:
        impatient = demo_app.client.with_options(timeout=1.0)
        with pytest.raises(openai.APITimeoutError):
            demo_app.complete(PROMPT, client=impatient, **fields)
    until(lambda: demo_app.engine()["num_requests"] == 0)
    after = demo_app.engine()
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["num_free_blocks"] == after["num_blocks"] - 1, "all but the padding's"
    # Six tokens a round at most: a request that was not aborted would have taken 334.
    assert after["phases"]["num_rounds"] - before["phases"]["num_rounds"] < 334
    demo_app.check_integrity()


@pytest.mark.slow
def test_leaving_one_stream_leaves_the_others_alone(demo_app):
    expected = demo_app.text(PROMPT, max_tokens=160)

    def leave() -> None:
        with demo_app.complete(PROMPT, max_tokens=1500, stream=True) as chunks:
            next(iter(chunks))

    with ThreadPoolExecutor(4) as threads:
        stay = [threads.submit(demo_app.text, PROMPT, max_tokens=160) for _ in range(3)]
        threads.submit(leave).result()
        assert [answer.result() for answer in stay] == [expected] * 3


# All refusals are in `tests/deployments/api/test_openai_api.py`; these need the served model, or come through HTTP.
BAD_COMPLETIONS = [
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"prompt": [1, 4096]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": "x = 1\n" * 3000}, "prompt"),
]
BAD_CHATS = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x = 1\n" * 3000}]}, "messages"),
    ({"max_tokens": None, "max_completion_tokens": 5000}, "max_completion_tokens"),
]


def naming(case) -> str:
    return "-".join(f"{name}={str(value)[:24]}" for name, value in case.items()) if isinstance(case, dict) else ""


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=naming)
def test_a_completion_that_cannot_be_honoured_is_a_400_naming_the_field(demo_app, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        demo_app.complete(PROMPT, extra=fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert param in refused.value.message or "context length" in refused.value.message


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=naming)
def test_a_chat_that_cannot_be_honoured_is_a_400_naming_the_field(demo_app, fields, param):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(demo_app, extra=fields)
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"


def test_a_body_that_is_no_json_is_a_400(demo_app):
    for content in (b"{", b"[]", b'{"model": NaN}'):
        headers = {"Content-Type": "application/json"}
        response = demo_app.http.post("/v1/completions", content=content, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"
    response = demo_app.http.post("/v1/completions", json={"model": MODEL})
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_a_field_that_means_nothing_here_is_named_in_a_header(demo_app, stream):
    body = {"prompt": PROMPT, "max_tokens": 2, "max_token": 3, "store": True, "stream": stream}
    answer = demo_app.http.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-wingbeat-ignored-fields"] == "max_token (max_tokens?)"


@pytest.mark.slow
def test_fields_that_ask_for_nothing_are_taken(demo_app):
    fields = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "logprobs": None, "best_of": 1}
    assert demo_app.text(PROMPT, user="someone", **fields) == demo_app.text(PROMPT)
    fields = {"tools": [], "response_format": {"type": "text"}, "logprobs": False}
    assert chat(demo_app, extra=fields).choices[0].message.content == chat(demo_app).choices[0].message.content


def test_an_unknown_model_is_a_404(demo_app):
    for ask in (lambda: demo_app.complete(PROMPT, model="gpt-x"), lambda: chat(demo_app, model="gpt-x")):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        demo_app.client.models.retrieve("gpt-x")


def test_models_and_health(demo_app):
    (model,) = demo_app.client.models.list().data
    assert (model.id, model.max_model_len, model.drafter) == (MODEL, 2048, "demo")
    assert demo_app.client.models.retrieve(MODEL).id == MODEL
    assert demo_app.http.get("/health").json() == {"status": "ok"}
