"""Raw bytes against a router, itself and behind Serve's proxy: an error or a closed connection, and others go on."""

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from .bystander import bystanders
from .client import Address, Answer, completion, exchange, health, parse, send
from .contract import MAX_BODY_BYTES
from .framing import BODY, CHUNKED, chunks, get, malformed, post, unusual
from .memory import bounded_growth

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]

MAX_GROWTH_BYTES = 300 * 10**6


@pytest.fixture(params=["own", pytest.param("proxy", marks=pytest.mark.slow)])
def address(request, demo_app, ray_cluster) -> Address:
    """Where the demo pair's router listens, or the proxy before it."""
    if request.param == "own" and demo_app.own_url is None:
        pytest.skip("front_door is deleted: the router has no address of its own")
    url = urlsplit(demo_app.own_url if request.param == "own" else f"{ray_cluster}/{demo_app.name}")
    return Address(url.hostname, url.port, url.path)


async def is_healthy(address: Address) -> bool:
    """Whether the server answers somebody else."""
    return (await send(address, health())).status == 200


async def answer_to(address: Address, data: bytes, **how) -> Answer:
    """The first answer to some bytes; the server must answer, or close, and go on."""
    answer = await exchange(address, data, first_only=True, **how)
    assert not answer.hung, f"no answer: {answer.body[:200]!r}"
    assert await is_healthy(address)
    return answer


def is_refusal(answer: Answer) -> bool:
    """A closed connection, an error of the client's, or a busy server."""
    return answer.status == 0 or 400 <= answer.status < 500 or answer.status == 503


@pytest.mark.few(6)
@pytest.mark.parametrize("name", malformed(""))
def test_malformed_bytes_are_refused(address, name):
    answer = asyncio.run(answer_to(address, malformed(address.prefix)[name]))
    assert is_refusal(answer), f"{answer.status} {answer.body[:300]!r}"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", unusual(""))
def test_unusual_bytes_are_served_or_refused(address, name):
    answer = asyncio.run(answer_to(address, unusual(address.prefix)[name]))
    assert answer.status == 200 or is_refusal(answer), f"{answer.status} {answer.body[:300]!r}"


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["X-Request-Id", "Authorization", "Origin", "Content-Type", "Cookie"])
def test_header_bytes_that_are_no_text_end_nobody_elses_request(address, name):
    data = get(address.prefix, name.encode() + b": \xff\xfe")
    answer = asyncio.run(answer_to(address, data))
    # Serve's proxy decodes headers before the application sees them, and answers 500 to what it cannot decode.
    assert answer.status in (200, 500) or is_refusal(answer), f"{answer.status} {answer.body[:300]!r}"


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "chunked"])
def test_a_body_that_is_too_long_is_a_413_and_ends_the_connection(address, announced):
    async def scene() -> None:
        if announced:
            data = post(address.prefix, ("Content-Length", str(MAX_BODY_BYTES + 1)), body=b"")
        else:
            piece = b"x" * 2**16
            data = post(address.prefix, CHUNKED, body=chunks(*[piece] * (MAX_BODY_BYTES // len(piece) + 2))[:-5])
        answer = await exchange(address, data)
        assert not answer.hung, "the connection stays open"
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (413, "body_too_large")
        assert await is_healthy(address)

    asyncio.run(scene())


@pytest.mark.slow
def test_a_body_that_comes_in_drops_is_served_and_holds_nobody_up(address):
    async def scene() -> None:
        head = post(address.prefix, ("Content-Length", str(len(BODY))), ("Connection", "close"), body=b"")
        async with bystanders(address, count=1, max_tokens=64):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            for place in range(len(head)):
                writer.write(head[place : place + 1])
                if place % 40 == 0:
                    await asyncio.sleep(0.01)
            for place in range(len(BODY)):
                writer.write(BODY[place : place + 1])
                await asyncio.sleep(0.01)
                if place % 40 == 0:
                    assert await is_healthy(address)
            async with asyncio.timeout(60):
                assert parse(await reader.read()).status == 200
            writer.close()

    asyncio.run(scene())


def test_requests_in_a_row_on_one_connection_are_answered_in_their_order(address):
    case = completion(prompt="x", max_tokens=2)
    body = len(case.body)
    good = post(address.prefix, ("Content-Length", str(body)), ("X-Request-Id", "first"), body=case.body)
    data = good + get(address.prefix, b"X-Request-Id: second", b"Connection: close")
    answer = asyncio.run(exchange(address, data))
    assert (answer.status, answer.all("x-request-id")) == (200, ["first"])
    assert json.loads(answer.body)["usage"]["completion_tokens"] == 2
    second = parse(answer.rest)
    assert (second.status, second.all("x-request-id"), second.rest) == (200, ["second"], b"")


@pytest.mark.few(2)
@pytest.mark.parametrize("sent", [len(BODY), len(BODY) - 1, 0], ids=["whole-body", "cut-body", "no-body"])
def test_a_client_that_says_it_has_finished_gets_an_end(address, sent):
    data = post(address.prefix, ("Content-Length", str(len(BODY))), body=BODY[:sent])
    answer = asyncio.run(answer_to(address, data, half_close=True))
    assert is_refusal(answer) or (answer.status == 200 and sent == len(BODY))


@pytest.mark.slow
def test_connections_that_say_nothing_hold_nobody_up(address):
    async def scene() -> None:
        beginnings = (
            b"",
            b"P",
            b"POST /v1/completions HTTP/1.1\r\nHost:",
            post(address.prefix, CHUNKED, body=b"5\r\n{"),
        )
        opened = [await asyncio.open_connection(address.host, address.port) for _ in range(100)]
        for place, (_, writer) in enumerate(opened):
            writer.write(beginnings[place % len(beginnings)])
        async with bystanders(address, count=1, max_tokens=32):
            for _ in range(10):
                assert await is_healthy(address)
        for _, writer in opened:
            writer.close()

    asyncio.run(scene())


def stream_bytes(address: Address) -> bytes:
    """A request for four long streams in one."""
    return completion(prompt="import", max_tokens=1500, n=4, stream=True, temperature=1, seed=1).wire(address.prefix)


@pytest.mark.slow
def test_a_client_that_never_reads_its_stream_harms_nobody(address, demo_app, until):
    async def scene() -> None:
        async with bystanders(address, count=1, max_tokens=64):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
            writer.transport.pause_reading()
            writer.write(stream_bytes(address))
            for _ in range(20):
                assert await is_healthy(address)
                await asyncio.sleep(0.1)
        writer.transport.abort()
        del reader

    with bounded_growth(MAX_GROWTH_BYTES):
        asyncio.run(scene())
    until(lambda: demo_app.engine()["num_requests"] == 0)
    demo_app.check_integrity()


@pytest.mark.few(1)
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_a_client_that_leaves_in_mid_stream_frees_its_blocks(address, demo_app, until, reset):
    async def scene() -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(stream_bytes(address))
        while b"data: " not in await reader.readline():
            pass
        if reset:
            writer.transport.abort()
        else:
            writer.close()
            await writer.wait_closed()

    asyncio.run(scene())
    until(lambda: demo_app.engine()["num_requests"] == 0)
    stats = demo_app.engine()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1, "all but the padding's"
    demo_app.check_integrity()
