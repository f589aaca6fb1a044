"""Answers that are much longer than their requests: bounded, made once for all choices, and written in pieces."""

import asyncio
import json

import pytest

from tests.deployments.http_world import TOKENIZER, Connection, FakePool, app_for, call, chat, chunks, complete
from wingbeat.deployments.api.answers import json_pieces
from wingbeat.deployments.api.answers.answer_size import ANSWERS_AT_ONCE, AnswerSizes
from wingbeat.deployments.api.answers.json_pieces import LongList, LongPart, SharedPart, fragments
from wingbeat.deployments.api.bodies.chat_requests import ChatBody
from wingbeat.deployments.api.bodies.requests import CompletionBody
from wingbeat.deployments.api.completions import CompletionService
from wingbeat.deployments.api.routes import create_app
from wingbeat.deployments.fleet.interface import EngineOverloaded
from wingbeat.deployments.limits import MAX_ANSWER_BYTES

IDS = TOKENIZER.encode("what is said of a prompt")


def completion(**fields) -> CompletionBody:
    return CompletionBody.of_fields({"prompt": "x", **fields})


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "max_tokens"),
    [
        ({"logprobs": 1, "echo": True, "max_tokens": 1}, [4096] * 16, 1),
        ({"logprobs": 1, "echo": True, "max_tokens": 0}, [128_000], 0),
        ({"prompt_logprobs": 1, "max_tokens": 1}, [32_000] * 4, 1),
        ({"logprobs": 5, "n": 8}, [1000], 4096),
        ({"logprobs": 20, "stream": True}, [1000], 128_000),
        ({"n": 128}, [100_000], 28_000),
        ({"return_token_ids": True, "n": 16}, [8000], 8000),
    ],
    ids=["lm-eval", "long context", "prompts", "choices", "stream", "text", "ids"],
)
def test_what_people_ask_for_is_answered(fields, num_prompt_tokens, max_tokens):
    assert AnswerSizes().check(completion(**fields), num_prompt_tokens, max_tokens) <= MAX_ANSWER_BYTES


@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [
        (complete, {"prompt_logprobs": 20, "n": 16}, "prompt_logprobs"),
        (complete, {"prompt_logprobs": 2, "logprobs": 20, "n": 16}, "logprobs"),
        (complete, {"echo": True, "logprobs": 20, "max_tokens": 0, "n": 16, "prompt": "x" * 60}, "logprobs"),
        (complete, {"speculation": {"trace": True}, "n": 16}, "speculation.trace"),
        (complete, {"return_token_ids": True, "prompt": [IDS] * 128}, "return_token_ids"),
        (complete, {"echo": True, "prompt": ["x" * 60] * 128, "max_tokens": 1}, "echo"),
        (complete, {"prompt_logprobs": 20, "prompt": [IDS] * 16, "stream": True}, "prompt_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 40}, "top_logprobs"),
        (
            chat,
            {"prompt_logprobs": 20, "n": 60},
            "prompt_logprobs",
        ),
    ],
)
def test_more_than_a_server_holds_is_refused_by_field_and_numbers(ask, fields, param):
    pool, limit = FakePool(), 20_000 if param not in ("return_token_ids", "echo") else 10_000
    path = "/v1/completions" if ask is complete else "/v1/chat/completions"
    body = {"prompt": "hi"} if ask is complete else {"messages": [{"role": "user", "content": "hi"}]}
    response = call(pool, path, {"max_tokens": 40, **body, **fields}, max_answer_bytes=limit)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "answer_too_long", param)
    assert str(limit) in error["message"]
    assert "max_answer_bytes" in error["message"]
    assert not pool.requests


def test_a_length_that_nobody_asked_for_is_cut_to_what_fits():
    pool = FakePool()
    fields = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 9, "n": 2}
    assert call(pool, "/v1/chat/completions", fields, max_answer_bytes=2 * 10 * 960).status_code == 200
    assert [request.params.max_tokens for request in pool.requests] == [10, 10]


def test_longest_answers_have_room_for_a_few_and_the_others_are_told_to_wait():
    sizes = AnswerSizes(1000)
    held = [sizes.held(1000) for _ in range(ANSWERS_AT_ONCE)]
    for room in held:
        room.__enter__()
    with pytest.raises(EngineOverloaded), sizes.held(1):
        pass
    held[0].__exit__(None, None, None)
    with sizes.held(1000):
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_reported_on_once_for_all_choices(stream):
    pool = FakePool("hello")
    response = complete(pool, prompt=[IDS, IDS[:5]], n=3, prompt_logprobs=2, logprobs=1, echo=True, stream=stream)
    asked = [request.params.prompt_logprobs for request in pool.requests]
    assert asked == [2, None, None, 2, None, None]
    bodies = chunks(response) if stream else [response.json()]
    found = [choice for body in bodies for choice in body["choices"]]
    reports = {choice["index"]: choice["prompt_logprobs"] for choice in found if "prompt_logprobs" in choice}
    assert len(reports) == 6
    assert reports[0] == reports[1] == reports[2]
    assert [len(reports[index]) for index in (2, 3)] == [len(IDS), 5]
    tokens = {index: [] for index in reports}
    for choice in found:
        if choice["logprobs"] is not None:
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert tokens[1] == [*"what is said of a prompt", *"hello", "<eos>"]


def test_choices_wait_for_the_one_that_reports_on_their_prompt():
    class Late(FakePool):
        async def generate(self, request, session_id=""):
            for _ in range(20 * (request.params.prompt_logprobs is not None)):
                await asyncio.sleep(0)
            async for output in super().generate(request, session_id):
                yield output

    got = [body["choices"][0] for body in chunks(complete(Late("hello"), n=2, prompt_logprobs=1, stream=True))]
    firsts = {index: next(choice for choice in got if choice["index"] == index) for index in (0, 1)}
    assert firsts[0]["prompt_logprobs"] == firsts[1]["prompt_logprobs"]
    assert got[0]["index"] == 0


def test_a_list_is_written_a_few_items_at_a_time_and_a_shared_one_once():
    made = []

    def as_value(item: int) -> int:
        made.append(item)
        return item

    shared = SharedPart(range(1000), as_value)
    lists = [LongList(shared, LongPart(range(5))) for _ in range(3)]
    value = {
        "a": "x",
        "choices": [{"i": i, "long": one} for i, one in enumerate(lists)],
        "none": [],
        "empty": LongList(),
    }
    written, sizes = [], []
    for fragment in fragments(value):
        written.append(fragment)
        sizes.append(len(made) - sum(sizes))
    whole = [*range(1000), *range(5)]
    expected = {"a": "x", "choices": [{"i": i, "long": whole} for i in range(3)], "none": [], "empty": []}
    assert json.loads("".join(written)) == expected
    assert made == [*range(1000)]
    assert max(sizes) <= json_pieces.MOST_ITEMS


@pytest.mark.parametrize("stream", [False, True])
def test_the_event_loop_turns_between_any_two_pieces(stream, monkeypatch):
    """So that others are served, however many long answers there are at once."""
    monkeypatch.setattr(json_pieces, "PIECE_CHARS", 100)
    turns = made = most = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    last = 0
    dumps = json_pieces.dumps

    def counting(value) -> str:
        nonlocal made, most, last
        made, last = (made + 1 if last == turns else 1), turns
        most = max(most, made)
        return dumps(value)

    monkeypatch.setattr(json_pieces, "dumps", counting)

    async def scene() -> None:
        turning = asyncio.create_task(turn())
        body = {"prompt": IDS, "n": 16, "max_tokens": 20, "prompt_logprobs": 20, "stream": stream}
        app = app_for(FakePool("hello"))
        connections = [Connection(FakePool(), body) for _ in range(4)]
        for connection in connections:
            connection._app = app
        await asyncio.gather(*(connection.run() for connection in connections))
        turning.cancel()
        assert all(connection.sent[0]["status"] == 200 for connection in connections)
        assert all(len(connection.sent) > 16 for connection in connections)

    asyncio.run(scene())
    # A piece is a fragment of a list and the small ones around it; a piece of each of four answers would be more.
    assert most < 60


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_reader_holds_its_room_until_it_leaves(stream):
    async def scene() -> None:
        body = {"prompt": IDS, "n": 16, "max_tokens": 20, "prompt_logprobs": 20, "stream": stream}
        connection = Connection(FakePool("hello"), body)
        service = CompletionService(FakePool("hello"), TOKENIZER, max_answer_bytes=10**6)
        connection._app = create_app(service)
        stuck, send = asyncio.Event(), connection._send

        async def hang(message: dict) -> None:
            await send(message)
            if len(connection.sent) > 2:
                stuck.set()
                await asyncio.Event().wait()

        connection._send = hang
        task = asyncio.create_task(connection.run())
        await stuck.wait()
        assert service.sizes.num_held_bytes > 16 * 20 * len(IDS)
        connection.left.set()
        await asyncio.wait([task], timeout=5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert service.sizes.num_held_bytes == 0

    asyncio.run(scene())


def test_a_conversation_says_how_many_bytes_a_token_has():
    body = ChatBody.of_fields({"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 9})
    assert AnswerSizes().check(body, [10], 9) == 9 * 96
