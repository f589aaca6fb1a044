"""Prompts cut inside a character: an answer contains none of the prompt, and reports its tokens' offsets."""

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool, chat, chunks, complete

WIDE = TOKENIZER.encode("漢")


def text_of(response, stream: bool) -> str:
    bodies = chunks(response) if stream else [response.json()]
    parts = [
        choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        for body in bodies
        for choice in body["choices"]
    ]
    return "".join(parts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [WIDE[:1], WIDE[:2], WIDE[1:], [*TOKENIZER.encode("x"), *WIDE[1:], *WIDE[:2]]])
def test_an_answer_does_not_begin_by_what_the_prompt_left_open(prompt, stream):
    response = complete(FakePool("(self)"), prompt=prompt, stream=stream, stop=["\ufffd"])
    assert text_of(response, stream) == "(self)"


@pytest.mark.parametrize("ask", [complete, chat])
def test_a_truncated_prompt_may_begin_and_end_inside_characters(ask):
    for kept in range(1, 8):
        fields = {"prompt": "漢字😀漢字"} if ask is complete else {"messages": [{"role": "user", "content": "漢字😀"}]}
        response = ask(FakePool("ab"), **fields, truncate_prompt_tokens=kept)
        assert text_of(response, False) == "ab"


def test_a_character_that_prompt_and_answer_share_is_the_answers():
    class Completing(FakePool):
        async def generate(self, request, session_id=""):
            async for output in super().generate(request, session_id):
                yield output._replace(token_ids=tuple(WIDE[1:]) if output.token_ids[:1] == (WIDE[0],) else (0,))

    for echo, text in ((False, "漢"), (True, "x漢")):
        pool = Completing("漢", tokens_per_output=3)
        prompt = [*TOKENIZER.encode("x"), WIDE[0]]
        assert text_of(complete(pool, prompt=prompt, echo=echo), False) == text


def test_log_probabilities_have_the_bytes_of_tokens_and_where_they_stand_in_the_text():
    spelled = "é漢x"
    content = chat(FakePool(spelled), logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]) == spelled.encode()
    logprobs = complete(FakePool(spelled), logprobs=0, prompt="é", echo=True).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 3, 4]
