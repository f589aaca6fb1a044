"""The application on Ray Serve: HTTP in front, engines and drafters in processes that tests may kill."""

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import expected_tokens
from tests.needs import needs
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine_client import EngineFailed
from wingbeat.runtime.drafters.choice import FALLBACK

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")]
FAKE, REAL = "fake", "real"
PROMPT = "abcabcabcabcabc"


@pytest.fixture(scope="module")
def fake_app(ray_cluster: str, tiny_model: Path) -> Iterator[httpx.Client]:
    """Two fake engines behind one router."""
    config = AppConfig(
        model=tiny_model,
        drafter="none",
        served_model_name="tiny",
        engine_factory="tests.fakes:build_fake_engine",
        num_replicas=2,
        max_model_len=4000,
    )
    with running(FAKE, config, ray_cluster) as client:
        yield client


@pytest.fixture(scope="module")
def real_app(ray_cluster: str, tiny_model: Path) -> Iterator[httpx.Client]:
    """A real engine with the `FALLBACK` drafter, which has no weights."""
    config = AppConfig(
        model=tiny_model,
        drafter=FALLBACK.kind,
        served_model_name="tiny",
        max_model_len=512,
        num_kv_blocks=600,
        drafter_timeout_s=1.0,
    )
    with running(REAL, config, ray_cluster) as client:
        yield client


@contextmanager
def running(name: str, config: AppConfig, url: str) -> Iterator[httpx.Client]:
    """The application of a configuration, for as long as the block lasts."""
    from ray import serve

    from wingbeat.deployments.app import build

    serve.run(build(config), name=name, route_prefix=f"/{name}")
    try:
        with httpx.Client(base_url=f"{url}/{name}", timeout=60) as client:
            yield client
    finally:
        serve.delete(name)


def verifier_stats(app: str) -> dict[str, dict[str, Any]]:
    """Stats of every engine by its id; repeats the request until every engine has answered."""
    from ray import serve

    handle = serve.get_deployment_handle("Verifier", app)
    status = serve.status().applications[app].deployments["Verifier"]
    found: dict[str, dict[str, Any]] = {}
    for _ in range(200):
        try:
            stats = handle.stats.remote().result(timeout_s=30)
        except EngineFailed:  # it is being started anew
            time.sleep(0.1)
            continue
        found[stats["engine_id"]] = stats
        if len(found) >= sum(status.replica_states.values()):
            break
    return found


def until(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.1)


def complete(client: httpx.Client, prompt: str = "abc", **fields: Any) -> dict:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "seed": 1, "ignore_eos": True, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def text_of(token_ids: tuple[int, ...], model: Path) -> str:
    from wingbeat.runtime.tokenizer import Tokenizer

    return Tokenizer.load(model).decode(token_ids)


@pytest.mark.slow
def test_both_engines_are_used_and_every_answer_is_its_own(fake_app: httpx.Client, tiny_model: Path):
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda seed: complete(fake_app, seed=seed)["choices"][0]["text"], range(8)))
    from wingbeat.runtime.tokenizer import Tokenizer

    prompt = tuple(Tokenizer.load(tiny_model).encode("abc"))
    assert texts == [text_of(expected_tokens(prompt, seed, 40), tiny_model) for seed in range(8)]
    assert all(stats["num_started"] > 0 for stats in verifier_stats(FAKE).values())
    assert len(verifier_stats(FAKE)) == 2


@pytest.mark.slow
def test_a_stream_says_the_same_as_the_whole_answer(fake_app: httpx.Client):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "seed": 5, "stream": True}
    with fake_app.stream("POST", "/v1/completions", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    streamed = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert streamed == complete(fake_app, seed=5)["choices"][0]["text"]
    assert len(events) > 3


def test_the_router_knows_what_address_the_proxy_listens_on(demo_app: Any):
    assert demo_app.http.get("/v1/models", headers={"Host": "localhost:1"}).status_code == 200
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert demo_app.http.get("/v1/models", headers=headers).status_code == 403


def test_every_answer_has_one_request_id(demo_app: Any):
    for path in ("/health", "/nowhere"):
        assert len(demo_app.http.get(path).headers.get_list("x-request-id", split_commas=True)) == 1
        assert demo_app.http.get(path, headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"


def test_a_body_that_is_too_long_ends_its_connection(demo_app: Any):
    parts = (b"x" * 65536 for _ in range(2000))
    response = demo_app.http.post("/v1/completions", content=parts, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.headers["connection"]) == (413, "close")


@pytest.mark.slow
def test_a_client_that_leaves_takes_its_requests_with_it(fake_app: httpx.Client):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3900, "seed": 5, "n": 4, "stream": True}
    with fake_app.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    until(lambda: all(stats["num_requests"] == 0 for stats in verifier_stats(FAKE).values()), 10)
    assert all(stats["num_free_blocks"] == stats["num_blocks"] for stats in verifier_stats(FAKE).values())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine_pid", "pid"])
def test_requests_of_a_killed_process_go_on_elsewhere_and_it_is_replaced(
    fake_app: httpx.Client, tiny_model: Path, victim: str
):
    from wingbeat.runtime.tokenizer import Tokenizer

    prompt = tuple(Tokenizer.load(tiny_model).encode("abc"))
    undisturbed = [text_of(expected_tokens(prompt, seed, 500), tiny_model) for seed in range(2)]
    # Five seconds each: long enough that both engines are seen at work before one is killed.
    with ThreadPoolExecutor(6) as threads:
        answers = [threads.submit(complete, fake_app, seed=seed % 2, max_tokens=500) for seed in range(6)]
        until(lambda: all(stats["num_requests"] > 0 for stats in verifier_stats(FAKE).values()), 20)
        before = verifier_stats(FAKE)
        killed = next(iter(before.values()))
        os.kill(killed[victim], signal.SIGKILL)
        assert [answer.result()["choices"][0]["text"] for answer in answers] == undisturbed * 3
    if victim == "pid":
        until(lambda: len(verifier_stats(FAKE).keys() - {killed["engine_id"]}) == 2)
        until(lambda: not process_exists(killed["engine_pid"]))
    else:
        # Other engines answer /health meanwhile; a replica whose engine starts is not among those with figures.
        until(lambda: killed["engine_id"] in verifier_stats(FAKE))
        now = verifier_stats(FAKE)
        assert now.keys() == before.keys(), "no new replica"
        assert now[killed["engine_id"]]["num_engine_restarts"] == 1


@pytest.mark.slow
def test_requests_of_a_killed_router_are_aborted(fake_app: httpx.Client):
    body = {"model": "tiny", "prompt": "abc", "max_tokens": 3900, "seed": 5, "n": 8, "stream": True}
    with fake_app.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        os.kill(router_pid(FAKE), signal.SIGKILL)
        # Left alone they would run for more than 39 s.
        until(lambda: all(stats["num_requests"] == 0 for stats in verifier_stats(FAKE).values()), 30)
    until(lambda: fake_app.get("/health").status_code == 200)


@pytest.mark.slow
def test_speculation_changes_no_token_and_saves_rounds(real_app: httpx.Client):
    fast = complete(real_app, PROMPT, temperature=0, max_tokens=64)
    plain = complete(real_app, PROMPT, temperature=0, max_tokens=64, speculation={"enabled": False})
    assert fast["choices"][0]["text"] == plain["choices"][0]["text"]
    assert fast["metrics"]["speculative_decoding"]["acceptance_length"] > 1
    assert plain["metrics"]["speculative_decoding"]["num_drafts"] == 0


@needs("client_metrics")
def test_a_scrape_shows_the_engine_and_what_its_client_saw(demo_app: Any):
    demo_app.complete(PROMPT)
    (engine_id,) = demo_app.engines()
    labels = f'{{engine="{engine_id}",model_name="wingbeat-demo"}}'

    def scraped() -> dict[str, str]:
        lines = demo_app.http.get("/metrics").text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    least = {"e2e_request_latency_seconds_count": 1, "generation_tokens_total": 40, "spec_decode_num_drafts_total": 1}

    def all_there() -> bool:
        values = scraped()
        return all(float(values.get(f"vllm:{name}{labels}", 0)) >= count for name, count in least.items())

    until(all_there)  # figures may be of the second before
    assert scraped()[f"wingbeat_engine_up{labels}"] == "1.0"


@needs("round_traces")
@pytest.mark.slow
def test_a_trace_of_rounds_is_chromes(real_app: httpx.Client):
    with ThreadPoolExecutor(1) as thread:
        recording = thread.submit(real_app.get, "/trace?seconds=2")
        while not recording.done():
            complete(real_app, PROMPT, temperature=0)
        events = recording.result().json()["traceEvents"]
    assert {"schedule", "accept", "round"} <= {event["name"] for event in events if event["ph"] == "X"}


@pytest.mark.slow
def test_an_idle_engine_has_every_block_free(real_app: httpx.Client):
    from ray import serve

    serve.get_deployment_handle("Verifier", REAL).check_integrity.remote().result(timeout_s=30)
    (stats,) = verifier_stats(REAL).values()
    assert stats["num_free_blocks"] == stats["num_blocks"] - 1  # block 0 is the padding's


@pytest.mark.slow
def test_a_drafter_that_cannot_be_read_is_the_start_error(ray_cluster: str, tiny_model: Path, tmp_path: Path):
    from ray import serve

    from wingbeat.deployments.launch import APP_NAME, ServedApplication, StartError

    (tmp_path / "config.json").write_text("{}")
    try:
        with pytest.raises(StartError, match=r"^the drafter cannot start: .+") as caught:
            ServedApplication(AppConfig(model=tiny_model, drafter=str(tmp_path), max_model_len=512)).start()
        assert "\n" not in str(caught.value)
    finally:
        serve.delete(APP_NAME)


def router_pid(app: str) -> int:
    """Process of the application's only router; Ray names a worker after its actor class."""
    name = f"ray::ServeReplica:{app}:Router".encode()
    found = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes().startswith(name)]
    assert len(found) == 1
    return int(found[0])


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
