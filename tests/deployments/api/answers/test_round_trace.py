"""A request for a round trace gets the origin of its tokens, and its text stays equal."""

import pytest

from tests.deployments.http_world import TOKENIZER, FakePool, chat, chunks, complete
from wingbeat.runtime.scheduling.request import VerifiedRound

TEXT = "größer, 日本 … end"
TRACE = {"enabled": True, "trace": True}


class TracedPool(FakePool):
    """Each output is a round: a tree of wrong children and the right path, whose last token is the verifier's."""

    async def generate(self, request, session_id=""):
        async for output in super().generate(request):
            ids = output.token_ids
            path = tuple(range(2, len(ids) + 1))
            tree = VerifiedRound(ids, (7, 9, *ids[:-1]), (-1, 0, 0, *path[:-1])[: len(ids) + 1], path)
            yield output._replace(rounds=(tree,)) if request.params.trace else output


def rounds_of(choices):
    return [one for choice in choices for one in choice.get("rounds", ())]


def text_of(rounds):
    return "".join(text for one in rounds for text in one["texts"])


@pytest.mark.parametrize("per_output", [1, 2, 5])
@pytest.mark.parametrize("stop", [[], ["…"], ["本 … en", "x"]])
def test_the_texts_of_a_stream_s_tokens_are_its_text(per_output, stop):
    def streamed(**fields):
        answer = chunks(complete(TracedPool(TEXT, per_output), stream=True, stop=stop, **fields))
        return [choice for chunk in answer for choice in chunk["choices"]]

    choices = streamed(speculation=TRACE)
    rounds = rounds_of(choices)
    assert text_of(rounds) == "".join(choice["text"] for choice in choices)
    assert text_of(rounds) == "".join(choice["text"] for choice in streamed())
    assert all(len(one["token_ids"]) == len(one["texts"]) == len(one["depths"]) for one in rounds)
    token_ids = [token_id for one in rounds for token_id in one["token_ids"]]
    assert token_ids == [*TOKENIZER.encode(TEXT), 0][: len(token_ids)]


def test_tokens_carry_their_depth_and_trees_their_path():
    (choice,) = complete(TracedPool("abc", 3), speculation=TRACE).json()["choices"]
    first, last = choice["rounds"]
    assert (first["texts"], first["depths"]) == (["a", "b", "c"], [1, 2, 0])
    assert first["tree"] == {
        "token_ids": [7, 9, *TOKENIZER.encode("ab")],
        "texts": [TOKENIZER.decode([7]), TOKENIZER.decode([9]), "a", "b"],
        "parents": [-1, 0, 0, 2],
        "accepted": [2, 3],
    }
    assert (last["token_ids"], last["texts"], last["depths"]) == ([0], [""], [0])


@pytest.mark.parametrize("ask", [complete, chat])
def test_each_choice_has_its_own_rounds(ask):
    pool = TracedPool(lambda request: "one" if request.request_id.endswith("-0") else "second", 2)
    whole = ask(pool, n=2, speculation=TRACE).json()["choices"]
    assert [text_of(choice["rounds"]) for choice in whole] == ["one", "second"]
    streamed = [
        choice for chunk in chunks(ask(pool, n=2, stream=True, speculation=TRACE)) for choice in chunk["choices"]
    ]
    for index, text in enumerate(["one", "second"]):
        assert text_of(rounds_of(choice for choice in streamed if choice["index"] == index)) == text


@pytest.mark.parametrize("speculation", [None, {"enabled": True}, {"enabled": False, "trace": False}])
def test_who_does_not_ask_gets_no_rounds(speculation):
    pool = TracedPool("abc")
    choices = complete(pool, speculation=speculation).json()["choices"]
    choices += [
        choice for chunk in chunks(chat(pool, stream=True, speculation=speculation)) for choice in chunk["choices"]
    ]
    assert not any("rounds" in choice for choice in choices)


def test_a_plain_request_may_ask_too():
    pool = TracedPool("abc")
    complete(pool, speculation={"enabled": False, "trace": True})
    (request,) = pool.requests
    assert (request.params.speculation, request.params.trace) == (False, True)


def test_a_round_without_a_tree_says_why():
    class PlainPool(FakePool):
        async def generate(self, request, session_id=""):
            async for output in super().generate(request):
                yield output._replace(rounds=(VerifiedRound(output.token_ids, plain_reason="no_drafter"),))

    (choice,) = complete(PlainPool("abc"), speculation=TRACE).json()["choices"]
    assert {(one["tree"], one["plain_reason"]) for one in choice["rounds"]} == {(None, "no_drafter")}
    (choice,) = complete(TracedPool("abc"), speculation=TRACE).json()["choices"]
    assert choice["rounds"][0]["plain_reason"] is None


@pytest.mark.parametrize("ask", [complete, chat])
def test_drafts_can_be_forced_and_not_without_speculation(ask):
    pool = FakePool("abc")
    assert ask(pool, speculation={"force": True}).status_code == 200
    assert ask(pool).status_code == 200
    assert [request.params.force_drafts for request in pool.requests] == [True, False]
    refused = ask(pool, speculation={"force": True, "enabled": False})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "speculation.force")
