"""Number of files that a round, a completion and a chat enter, as a debugger would, counted by a tracer."""

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import pytest

import wingbeat
from tests.deployments.http_world import URL, app_for
from tests.deployments.pool_world import LocalEngines, run
from tests.deployments.tool_world import named_parsers
from tests.needs import needs
from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import Request, SamplingParams

_SOURCES = tuple(f"{Path(folder).resolve()}/" for folder in wingbeat.__path__)
MOST = {"round": 49, "completion": 34, "chat": 40}
"""Files; Serve's hop between router and replica, and the engine behind a request, are not walked."""


@contextmanager
def files_entered() -> Iterator[set[str]]:
    """Files of Wingbeat in which a function was entered, on this thread and on others that start meanwhile."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
        paths = [Path(name).resolve() for name in found if name.endswith(".py")]
        rooms = tuple(Path(source).resolve() / room for source in _SOURCES for room in _rooms(source))
        found.clear()
        found |= {str(path) for path in paths if any(room.resolve() in path.parents for room in rooms)}


def _rooms(source: str) -> list[str]:
    return [room for room in ("kernels", "runtime", "cluster", "deployments") if (Path(source) / room).is_dir()]


def check(kind: str, files: set[str]) -> None:
    print(f"{kind}: {len(files)} files", *sorted(files), sep="\n  ")
    assert 0.9 * MOST[kind] <= len(files) <= MOST[kind]


@needs("adaptive")
def test_a_round_of_drafts():
    """Adaptive, sampled, with an EAGLE head, both ends of the channel: the busiest of some steady rounds."""
    pair = demo_pair()
    config = EngineConfig(max_num_seqs=2, max_model_len=256, speculation=SpeculationConfig(adaptive=True))
    llm = LLM(pair.verifier, pair.drafter, config, InProcessChannel, device="cpu", dtype="float32")
    engine: Engine = llm.engine
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=60, force_drafts=True)
    engine.add_request(Request("one", tuple(llm.tokenizer.encode("def first(values):\n    ")), params))
    for _ in range(6):
        engine.step()
    rounds = []
    for _ in range(4):
        with files_entered() as files:
            engine.step()
        rounds.append(files)
    check("round", max(rounds, key=len))


@pytest.mark.parametrize(
    ("kind", "path", "fields"),
    [
        ("completion", "/v1/completions", {"prompt": [1, 2, 3]}),
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_a_streamed_answer(kind: str, path: str, fields: dict):
    """From the HTTP application to the last token, over an engine's thread and a router's stream."""
    found: set[str] = set()

    async def stream(source: LocalEngines, pool: EnginePool) -> None:
        body = {"model": "fake", "max_tokens": 8, "stream": True, **fields}
        transport = httpx.ASGITransport(app_for(pool, parsers=named_parsers(None, None)))
        async with httpx.AsyncClient(transport=transport, base_url=URL) as client:
            await client.post(path, json=body)
            with files_entered() as files:
                answer = await client.post(path, json=body)
            found.update(files)
        assert answer.status_code == 200, answer.text
        assert json.loads(answer.text.split("\n\n")[0].removeprefix("data: "))

    run(stream, "a")
    check(kind, found)
