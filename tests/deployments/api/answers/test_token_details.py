"""Token details of whole and streamed answers: log-probabilities, ids, the prompt's tokens, and finish reasons."""

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool, chat, chunks, complete

HI = TOKENIZER.encode("hi")
HELLO = TOKENIZER.encode("hello")
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def scripted(token_id):
    """Log-probability that a `FakePool` reports for a token."""
    return -(token_id + 1) / 1000


def whole(call, **fields) -> dict:
    response = call(FakePool("hello"), **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(call, **fields) -> list[dict]:
    return [choice for chunk in chunks(call(FakePool("hello"), stream=True, **fields)) for choice in chunk["choices"]]


def joined(choices: list[dict]) -> dict[str, list]:
    """The lists of completions, over a stream's chunks."""
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
    return {name: [item for part in parts for item in part[name]] for name in LISTS}


def test_echoed_prompts_are_reported_like_the_answer():
    choice = whole(complete, echo=True, logprobs=2)
    assert choice["text"] == "hihello"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [*"hihello", "<eos>"]
    assert logprobs["token_logprobs"] == [None, *map(scripted, (*HI[1:], *HELLO, 0))]
    assert logprobs["top_logprobs"][0] is None
    assert all(top[name] == value for name, value, top in list(zip(*(logprobs[n] for n in LISTS[:3]), strict=True))[1:])
    assert all(len(top) == 3 for top in logprobs["top_logprobs"][1:-1])
    assert logprobs["text_offset"] == [*range(8)]


@pytest.mark.parametrize("fields", [{"echo": True}, {}, {"echo": True, "prompt": HI}], ids=["echo", "plain", "tokens"])
def test_streamed_log_probabilities_are_those_of_the_whole_answer(fields):
    parts = streamed(complete, logprobs=1, **fields)
    assert joined(parts) == whole(complete, logprobs=1, **fields)["logprobs"]
    assert len([part for part in parts if part["logprobs"]]) > 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompt", ["hi", HI, [0]], ids=["text", "tokens", "one token"])
def test_a_prompt_that_is_echoed_alone_is_reported_alone(prompt, stream):
    """Tokens that the engine generates regardless are not part of the answer."""
    fields = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
    rest = {"prompt_logprobs": 2, "ignore_eos": True, "stop": "l"}
    (choice,) = streamed(complete, **fields, **rest) if stream else [whole(complete, **fields, **rest)]
    ids = HI if prompt == "hi" else prompt
    assert choice["text"] == ("" if ids == [0] else "hi")
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
    assert choice["logprobs"]["token_logprobs"] == [None, *map(scripted, ids[1:])]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 2][: len(ids)]
    assert len(choice["prompt_logprobs"]) == len(choice["prompt_token_ids"]) == len(ids)


def test_a_prompt_that_is_echoed_alone_counts_no_token_and_as_a_request():
    pool = FakePool("hello", engine_id="e")
    fields = {"prompt": ["hi", "you"], "n": 2, "echo": True, "max_tokens": 0}
    answer = complete(pool, **fields).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hi", "hi", "you", "you"]
    assert answer["usage"]["completion_tokens"] == 0
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (5, 5)
    assert not pool.running


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"echo": True, "min_tokens": 1}], ids=str)
def test_an_answer_of_no_tokens_is_an_echo_alone(fields):
    response = complete(FakePool("hello"), max_tokens=0, **fields)
    error = response.json()["error"]
    expected = "min_tokens" if "min_tokens" in fields else "max_tokens"
    assert (response.status_code, error["code"], error["param"]) == (400, "invalid_value", expected)
    assert chat(FakePool("hello"), max_tokens=0).status_code == 400


def test_a_prompt_of_one_special_token_is_reported_too():
    logprobs = whole(complete, echo=True, logprobs=0, prompt=[0])["logprobs"]
    assert logprobs["tokens"] == ["<eos>", *"hello", "<eos>"]
    assert logprobs["token_logprobs"][0] is None


def test_tokens_named_by_their_ids_have_the_same_places_in_the_text():
    logprobs = whole(complete, logprobs=1, return_tokens_as_token_ids=True)["logprobs"]
    assert logprobs["tokens"][0] == f"token_id:{HELLO[0]}"
    assert logprobs["text_offset"] == [*range(6)]
    entry = whole(chat, logprobs=True, return_tokens_as_token_ids=True)["logprobs"]["content"][0]
    assert entry["bytes"] == [*b"h"]


def test_chat_lists_the_most_likely_tokens_best_first():
    content = whole(chat, logprobs=True, top_logprobs=3)["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [*"hello", "<eos>"]
    for entry in content:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)


def test_a_chat_stream_has_every_entry_once():
    parts = streamed(chat, logprobs=True, top_logprobs=1)
    entries = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert entries == whole(chat, logprobs=True, top_logprobs=1)["logprobs"]["content"]


@pytest.mark.parametrize("call", [complete, chat], ids=["completions", "chat"])
def test_tokens_come_with_those_of_the_prompt(call):
    answer = call(FakePool("hello"), return_token_ids=True, prompt_logprobs=0).json()
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [*HELLO, 0]
    parts = streamed(call, return_token_ids=True)
    assert [token_id for part in parts for token_id in part.get("token_ids", [])] == [*HELLO, 0]
    # A chat has one prompt, whatever its choices are.
    top, other = (answer, choice) if call is chat else (choice, answer)
    assert top["prompt_token_ids"][:2] == HI
    assert len(top["prompt_logprobs"]) == len(top["prompt_token_ids"])
    assert not {"prompt_token_ids", "prompt_logprobs"} & other.keys()


def test_a_stream_of_a_chat_has_what_is_said_of_the_prompt_beside_the_choices_once():
    fields = {"return_token_ids": True, "prompt_logprobs": 1, "n": 2}
    body = chat(FakePool("hello"), **fields).json()
    sent = chunks(chat(FakePool("hello"), stream=True, **fields))
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [chunk[name] for chunk in sent if name in chunk] == [body[name]]
        assert not any(name in choice for chunk in sent for choice in chunk["choices"])


def bounded(text: str) -> list[int]:
    return [0, *TOKENIZER.encode(text), 0]


@pytest.mark.few(6)
@pytest.mark.parametrize("skips", [True, False, None])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("prompt", ["hi", bounded("hi"), [0], [0, 0, *HI]], ids=["text", "both ends", "alone", "twice"])
def test_offsets_index_the_text_where_special_tokens_are_left_out_of_it_and_where_not(prompt, stream, skips):
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "skip_special_tokens": skips, "max_tokens": 7}
    parts = streamed(complete, **fields) if stream else [whole(complete, **fields)]
    text, logprobs = "".join(part["text"] for part in parts), joined(parts)
    hidden = {"<eos>"} if skips is not False else set()
    offsets = [*logprobs["text_offset"], len(text)]
    assert len(offsets) == len(logprobs["tokens"]) + 1
    # The token that ended the answer is no part of its text either way.
    assert logprobs["tokens"].pop() == "<eos>"
    for place, token in enumerate(logprobs["tokens"]):
        spelled = "" if token in hidden else token
        assert text[offsets[place] : offsets[place + 1]] == spelled, (place, token)


def test_the_chosen_token_is_the_first_of_the_top_ones_and_the_others_fall():
    for top in whole(complete, logprobs=5)["logprobs"]["top_logprobs"]:
        _, *others = top.values()
        assert others == sorted(others, reverse=True)
    tokens = whole(complete, logprobs=5)["logprobs"]
    assert [next(iter(top)) for top in tokens["top_logprobs"]] == tokens["tokens"]
    for entry in whole(chat, logprobs=True, top_logprobs=5)["logprobs"]["content"]:
        values = [other["logprob"] for other in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)


def test_prompt_logprobs_are_keyed_by_token():
    first, second = whole(complete, prompt_logprobs=1)["prompt_logprobs"]
    assert first is None
    assert second[str(HI[1])] == {"logprob": scripted(HI[1]), "decoded_token": "i"}
    assert len(second) == 2
    carriers = [part["prompt_logprobs"] for part in streamed(complete, prompt_logprobs=1) if "prompt_logprobs" in part]
    assert carriers == [[first, second]]


def test_log_probabilities_of_minus_infinity_are_numbers_in_json(monkeypatch):
    monkeypatch.setattr("tests.deployments.scripted_tokens.logprob_of", lambda _token_id: float("-inf"))
    for call, asked in ((complete, 1), (chat, True)):
        assert "-9999.0" in call(FakePool("hello"), logprobs=asked).text
        assert "Infinity" not in call(FakePool("hello"), logprobs=asked, stream=True).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason"),
    [
        ({"stop": "ll"}, "he", "ll"),
        ({"stop": "ll", "include_stop_str_in_output": True}, "hell", "ll"),
        ({"stop_token_ids": HELLO[2:3]}, "he", HELLO[2]),
        ({"stop_token_ids": HELLO[2:3], "include_stop_str_in_output": True}, "hel", HELLO[2]),
        ({"stop_token_ids": HELLO[2:3], "ignore_eos": True}, "he", HELLO[2]),
        ({"stop_token_ids": HELLO[2:3], "speculation": {"trace": True}}, "he", HELLO[2]),
        ({"stop": "l", "min_tokens": 3}, "hel", "l"),
        ({"stop": "h", "min_tokens": 2}, "hello", None),
        ({}, "hello", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello<eos>", None),
        ({"skip_special_tokens": False}, "hello", None),
    ],
    ids=str,
)
def test_what_ended_an_answer_is_said_and_shown_where_asked_for(fields, text, reason, stream):
    parts = streamed(complete, **fields) if stream else [whole(complete, **fields)]
    assert "".join(part["text"] for part in parts) == text
    assert parts[-1]["finish_reason"] == "stop"
    assert parts[-1]["stop_reason"] == reason


def test_details_end_with_the_text():
    choice = whole(complete, stop="ll", logprobs=0, return_token_ids=True)
    assert choice["token_ids"] == HELLO[:4]
    assert choice["logprobs"]["tokens"] == [*"hell"]


def test_of_a_truncated_prompt_the_end_counts():
    choice = whole(complete, prompt="abcdef", truncate_prompt_tokens=2, echo=True, return_token_ids=True)
    assert choice["prompt_token_ids"] == TOKENIZER.encode("ef")
    assert choice["text"] == "efhello"
    rest = whole(complete, prompt="x" * 500, truncate_prompt_tokens=-1, max_tokens=10, return_token_ids=True)
    assert len(rest["prompt_token_ids"]) == FakePool().info.max_model_len - 10


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "param"), [(0, 5, "prompt"), (-1, 64, "max_tokens"), (90, 5, "prompt")]
)
def test_a_truncation_that_leaves_nothing_or_too_much_is_a_400(truncate, max_tokens, param):
    fields = {"prompt": "x" * 500, "truncate_prompt_tokens": truncate, "max_tokens": max_tokens}
    response = complete(FakePool(), **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 5), (5, 1)])
def test_an_echoed_prompt_and_prompt_logprobs_have_each_their_number(logprobs, prompt_logprobs):
    choice = whole(complete, echo=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    assert len(choice["logprobs"]["top_logprobs"][1]) == logprobs + 1
    assert len(choice["prompt_logprobs"][1]) == prompt_logprobs + 1
