"""Rules that apply to every request before its endpoint, in the contract's order, and headers of every answer."""

import asyncio
import json
import logging

import pytest
from pydantic import SecretStr

from tests.deployments.http_world import Connection, FakePool, app_for, call, chat, chunks, complete
from wingbeat.deployments.api.access import Access
from wingbeat.deployments.api.guard import HttpLimits
from wingbeat.deployments.api.incoming import SHORT_BODY_BYTES
from wingbeat.deployments.fleet.interface import EngineOverloaded, EngineUnavailable
from wingbeat.deployments.parts import hooks, merged

LOCAL = Access.of_server("127.0.0.1")
PUBLIC = Access.of_server("0.0.0.0")
KEYED = Access(api_keys=(SecretStr("one"), SecretStr("two")))
BODY = {"model": "demo", "prompt": "hi"}
COMPLETIONS = "/v1/completions"


def refusal(response) -> tuple[int, str]:
    assert response.json()["error"]["type"] in ("invalid_request_error", "server_error")
    return response.status_code, response.json()["error"]["code"]


class TestPaths:
    @pytest.mark.parametrize("path", ["/v1/rerank", "/v1/completions/", "/v1", "/docs/", "/redoc"])
    def test_other_paths_are_unknown(self, path):
        assert refusal(call(FakePool(), path, BODY)) == (404, "unknown_url")

    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("/chat/completions", "/v1/chat/completions"),
            ("/v1/v1/completions", COMPLETIONS),
            ("/v1/completions/", COMPLETIONS),
            ("/api/show", None),
            ("/v1/" + "x" * 9000, None),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_a_path_that_is_nearly_one_is_told_which(self, path, meant):
        message = call(FakePool(), path, BODY).json()["error"]["message"]
        assert message.partition("Did you mean ")[2] == (f"'{meant}'?" if meant else "")

    @pytest.mark.parametrize(
        ("method", "path", "allow"),
        [
            ("GET", COMPLETIONS, "POST"),
            ("OPTIONS", COMPLETIONS, "POST"),
            ("DELETE", "/v1/models/demo", "GET"),
            ("POST", "/health", "GET, HEAD"),
        ],
    )
    def test_other_methods_are_refused_with_those_that_are_served(self, method, path, allow):
        response = call(FakePool(), path, method=method)
        assert refusal(response) == (405, "method_not_allowed")
        assert response.headers["allow"] == allow

    def test_health_can_be_asked_for_its_status_alone(self):
        assert call(FakePool(), "/health", method="HEAD").status_code == 200


class TestHosts:
    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "[::1]"])
    def test_a_local_server_answers_under_local_names(self, host):
        assert call(FakePool(), COMPLETIONS, BODY, headers={"Host": host}, access=LOCAL).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1@evil", "", "10.0.0.1:8000"])
    def test_a_local_server_answers_under_no_other_name(self, host):
        pool = FakePool()
        response = call(pool, COMPLETIONS, BODY, headers={"Host": host}, access=LOCAL)
        assert refusal(response) == (403, "host_not_allowed")
        assert not pool.requests

    @pytest.mark.parametrize(
        ("bound", "allowed", "taken"), [("0.0.0.0", None, True), ("0.0.0.0", ["a.example"], False)]
    )
    def test_a_server_for_all_answers_under_every_name_unless_told_which(self, bound, allowed, taken):
        access = Access.of_server(bound, allowed_hosts=allowed)
        status = call(FakePool(), "/health", method="GET", headers={"Host": "b.example"}, access=access).status_code
        assert status == (200 if taken else 403)

    def test_two_hosts_in_one_request_are_none(self):
        headers = [("Host", "localhost"), ("Host", "evil.example")]
        assert call(FakePool(), "/health", method="GET", headers=headers, access=LOCAL).status_code == 403


class TestOrigins:
    @pytest.mark.parametrize(
        ("access", "origin", "taken"),
        [
            (LOCAL, "http://localhost:3000", True),
            (LOCAL, "https://127.0.0.1", True),
            (LOCAL, "http://evil.example", False),
            (LOCAL, "http://localhost.evil.example", False),
            (LOCAL, "null", False),
            (PUBLIC, "http://localhost", True),
            (PUBLIC, "http://localhost:3000", False),
            (PUBLIC, "http://evil.example", False),
            (Access.of_server("0.0.0.0", allowed_origins=["https://app.example"]), "https://app.example", True),
            (Access.of_server("0.0.0.0", allowed_origins=["https://app.example"]), "http://app.example", False),
            (Access.of_server("127.0.0.1", allowed_origins=["https://app.example"]), "http://localhost:3000", False),
            (Access.of_server("0.0.0.0", allowed_origins=["*"]), "http://evil.example", True),
            (Access.of_server("0.0.0.0", allowed_origins=["*"]), "null", True),
        ],
    )
    def test_pages_of_taken_origins_are_answered_and_may_read_it(self, access, origin, taken):
        pool = FakePool()
        response = call(pool, COMPLETIONS, BODY, headers={"Origin": origin, "Host": "localhost"}, access=access)
        assert response.status_code == (200 if taken else 403)
        assert response.headers.get("access-control-allow-origin") == (origin if taken else None)
        assert bool(pool.requests) == taken

    def test_errors_can_be_read_by_the_page_that_caused_them(self):
        response = call(FakePool(), COMPLETIONS, b"{", headers={"Origin": "http://localhost", "Host": "localhost"})
        assert response.status_code == 400
        assert response.headers["access-control-allow-origin"] == "http://localhost"

    def test_preflights_of_taken_origins_are_answered_without_a_key(self):
        access = Access(origins=frozenset({"https://app.example"}), api_keys=KEYED.api_keys)
        headers = {
            "Origin": "https://app.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        response = call(FakePool(), COMPLETIONS, method="OPTIONS", headers=headers, access=access)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        assert response.headers["access-control-allow-methods"] == "POST"
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        refused = call(
            FakePool(), COMPLETIONS, method="OPTIONS", headers={**headers, "Origin": "https://b"}, access=access
        )
        assert refusal(refused) == (403, "origin_not_allowed")
        assert call(FakePool(), "/v2", method="OPTIONS", headers=headers, access=access).status_code == 404


class TestKeys:
    @pytest.mark.parametrize("value", ["Bearer one", "Bearer two", "bearer  two"])
    def test_each_of_several_keys_opens(self, value):
        assert call(FakePool(), COMPLETIONS, BODY, headers={"Authorization": value}, access=KEYED).status_code == 200

    @pytest.mark.parametrize(
        "value", [None, "", "Bearer", "Bearer ", "Bearer onetwo", "Basic one", "one", "Bearer \xfc"]
    )
    @pytest.mark.parametrize(("method", "path"), [("POST", COMPLETIONS), ("GET", "/v1/models")])
    def test_without_one_of_them_nothing_under_v1_is_answered(self, method, path, value):
        headers = [] if value is None else [(b"Authorization", value.encode("latin-1"))]
        response = call(FakePool(), path, BODY, method=method, headers=headers, access=KEYED)
        assert refusal(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"

    def test_two_keys_in_one_request_are_none(self):
        headers = [("Authorization", "Bearer one"), ("Authorization", "Bearer x")]
        assert call(FakePool(), COMPLETIONS, BODY, headers=headers, access=KEYED).status_code == 401

    def test_health_needs_none(self):
        assert call(FakePool(), "/health", method="GET", access=KEYED).status_code == 200

    def test_they_show_nowhere(self):
        assert "one" not in repr(KEYED)


class TestRequestIds:
    def test_the_callers_comes_back_with_every_answer(self):
        headers = {"X-Request-Id": "a b~" + "x" * 124}
        for path in (COMPLETIONS, "/nowhere"):
            assert call(FakePool(), path, BODY, headers=headers).headers["x-request-id"] == headers["X-Request-Id"]

    def test_one_is_drawn_where_none_is_given(self):
        drawn = [call(FakePool(), "/health", method="GET").headers["x-request-id"] for _ in range(2)]
        assert drawn[0] != drawn[1]

    @pytest.mark.parametrize("value", [b"", b"x" * 129, b"\xff", "é".encode(), b"a\tb"])
    def test_what_no_log_should_hold_is_refused(self, value):
        response = call(FakePool(), COMPLETIONS, BODY, headers=[(b"X-Request-Id", value)])
        assert refusal(response) == (400, "invalid_header")
        assert response.headers["x-request-id"].encode() != value

    @pytest.mark.parametrize("stream", [False, True])
    def test_an_unexpected_error_is_logged_under_it_with_its_traceback(self, caplog, stream):
        pool = FakePool()
        pool.fail_after = (1, RuntimeError("secret detail"))
        with caplog.at_level(logging.ERROR):
            response = call(pool, COMPLETIONS, {**BODY, "stream": stream}, headers={"X-Request-Id": "abc-1"})
        error = chunks(response)[-1]["error"] if stream else response.json()["error"]
        assert (error["code"], response.status_code) == ("internal_error", 200 if stream else 500)
        assert response.headers["x-request-id"] == "abc-1"
        assert "secret" not in response.text
        (record,) = [record for record in caplog.records if "abc-1" in record.getMessage()]
        assert "secret detail" in str(record.exc_info[1])

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stream_can_fail_with_a_status_before_its_first_event(self, stream):
        pool = FakePool()
        pool.fail_after = (0, RuntimeError("x"))
        assert refusal(complete(pool, stream=stream)) == (500, "internal_error")


class TestBodies:
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", ""])
    def test_what_a_browser_sends_without_asking_is_refused(self, kind):
        response = call(FakePool(), COMPLETIONS, BODY, headers={"Content-Type": kind})
        assert refusal(response) == (415, "unsupported_media_type")

    @pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
    def test_a_type_may_have_parameters(self, kind):
        assert call(FakePool(), COMPLETIONS, BODY, headers={"Content-Type": kind}).status_code == 200

    def test_an_announced_body_that_is_too_long_is_not_waited_for(self):
        exchange = Exchange(["1000"], limit=100)
        assert exchange.run() == (413, "body_too_large")
        assert exchange.headers["connection"] == "close"
        assert len(exchange.sent) == 3, "the answer was there before the end of the connection"

    @pytest.mark.parametrize("announced", ["9" * 4000, "9" * 19])
    def test_absurd_lengths_are_too_long(self, announced):
        assert Exchange([announced], limit=100).run() == (413, "body_too_large")

    def test_a_chunked_body_is_read_up_to_the_limit_and_dropped_up_to_another(self):
        exchange = Exchange([], limit=100, parts=[b"x" * 40] * 1000)
        assert exchange.run() == (413, "body_too_large")
        assert exchange.num_received == 3 + 200 // 40

    def test_long_bodies_have_room_for_a_few_and_short_ones_always(self):
        async def scene() -> None:
            limits = HttpLimits(2 * SHORT_BODY_BYTES, 10, max_held_bodies=1, max_dropped_bytes=0, drop_timeout_s=0.0)
            pool = FakePool()
            pool.hang_after = 0
            app = app_for(pool, limits=limits)
            connections = []
            for length in (SHORT_BODY_BYTES * 2, SHORT_BODY_BYTES * 2, SHORT_BODY_BYTES):
                connection = Connection(pool, {})
                connection._body = json.dumps(BODY).encode().ljust(length)
                connection._app = app
                connections.append(connection)
            tasks = []
            for connection in connections:
                tasks.append(asyncio.create_task(connection.run()))
                async with asyncio.timeout(20):
                    # Wait until every request so far is running or answered.
                    while len(pool.running) + sum(bool(one.sent) for one in connections) < len(tasks):
                        await asyncio.sleep(0.01)
            assert len(pool.running) == 2, "the second one waits for nobody"
            assert connections[1].sent[0]["status"] == 503
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            again = Connection(pool, {})
            pool.hang_after, again._app, again._body = None, app, connections[1]._body
            await again.run()
            assert again.sent[0]["status"] == 200

        asyncio.run(scene())

    def test_a_body_of_just_the_limit_is_read(self):
        content = json.dumps(BODY).encode()
        parts = [content[:10], b"", content[10:]]
        assert Exchange([], limit=len(content), parts=parts).run()[0] == 200
        assert Exchange([], limit=len(content) - 1, parts=parts).run()[0] == 413

    def test_a_body_that_does_not_come_is_not_waited_for(self):
        assert Exchange([], parts=[b"{"], hangs=True).run() == (408, "body_timeout")

    def test_a_client_that_leaves_within_its_body_gets_no_answer_and_no_log_line(self, caplog):
        pool = FakePool()
        assert Exchange([], parts=[b"{"], pool=pool, leaves=True).run()[0] == 499
        assert not pool.requests
        assert not caplog.records


class TestRetries:
    @pytest.mark.parametrize("kind", [EngineOverloaded, EngineUnavailable])
    def test_every_503_says_when_to_come_back(self, kind):
        pool = FakePool()
        pool.fail_after = (0, kind("busy", retry_after_s=7))
        for response in (complete(pool), chat(pool, stream=True)):
            assert (response.status_code, response.headers["retry-after"]) == (503, "7")
        assert str(kind("busy")) == "busy"
        assert kind().retry_after_s == 1

    def test_so_does_an_unhealthy_server(self):
        pool = FakePool()
        pool.alive = False
        assert call(pool, "/health", method="GET").headers["retry-after"] == "1"


def test_the_first_rule_that_is_broken_is_the_one_that_is_named():
    """Each request breaks one rule less than the one before."""
    access = Access.of_server("127.0.0.1", api_keys=KEYED.api_keys)
    headers = {"Host": "x", "Origin": "http://x.example", "X-Request-Id": "é", "Content-Type": "text/plain"}
    repairs = [
        ("path", 404),
        ("Host", 403),
        ("Origin", 403),
        ("Authorization", 401),
        ("X-Request-Id", 400),
        ("Content-Type", 415),
        ("size", 413),
        ("JSON", 400),
    ]
    good = {"Host": "localhost", "Origin": "http://localhost", "Authorization": "Bearer one", "X-Request-Id": "1"}
    good["Content-Type"] = "application/json"
    path, body = "/nowhere", b"x" * 100
    for rule, status in repairs:
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        response = call(FakePool(), path, body, headers=encoded, access=access, limits=HttpLimits(max_body_bytes=50))
        assert response.status_code == status, rule
        if rule == "path":
            path = COMPLETIONS
        elif rule == "size":
            body = b"x"
        elif rule != "JSON":
            headers[rule] = good[rule]


class Exchange(Connection):
    """An ASGI request whose body comes in parts."""

    def __init__(
        self,
        lengths: list[str],
        *,
        limit: int = 1000,
        parts: list[bytes] = [],  # noqa: B006
        pool: FakePool | None = None,
        hangs: bool = False,
        leaves: bool = False,
    ) -> None:
        super().__init__(pool or FakePool(), {})
        limits = HttpLimits(limit, 0.01 if hangs else 10, max_dropped_bytes=200, drop_timeout_s=0.05)
        self._app = app_for(pool or FakePool(), limits=limits)
        self.extra_headers = [(b"content-length", length.encode()) for length in lengths]
        self._parts, self._hangs, self._leaves = parts, hangs, leaves
        self.num_received = 0

    async def _receive(self) -> dict:
        index, self.num_received = self.num_received, self.num_received + 1
        if index < len(self._parts):
            last = index == len(self._parts) - 1 and not self._hangs and not self._leaves
            return {"type": "http.request", "body": self._parts[index], "more_body": not last}
        if not self._leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    def run(self) -> tuple[int, str | None]:
        """Status and error code of the answer."""
        asyncio.run(super().run())
        start, *rest = self.sent
        self.headers = {name.decode(): value.decode() for name, value in start["headers"]}
        body = b"".join(message.get("body", b"") for message in rest)
        error = json.loads(body).get("error", {}) if body else {}
        return start["status"], error.get("code")


def test_every_path_of_a_part_that_reads_a_body_needs_a_key():
    """404 is a route that needs more than a fake pool; paths of operators need the operator's key."""
    paths = merged("bodies").keys() - frozenset().union(*hooks("operator_paths"))
    answers = {path: call(FakePool(), path, {}, access=KEYED).status_code for path in paths}
    assert set(answers.values()) <= {401, 404}, answers


def test_a_session_id_reaches_the_pool_as_it_was_given():
    pool = FakePool()
    assert call(pool, COMPLETIONS, BODY, headers={"X-Session-Id": "talk 7"}).status_code == 200
    assert call(pool, COMPLETIONS, BODY).status_code == 200
    assert pool.sessions == ["talk 7", ""]
