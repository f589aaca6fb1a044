"""Adapters come and go while requests run, in real engines behind a router's pool: nothing is lost."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deployments.pool_world import LocalEngines, collect, run, tokens
from tests.runtime.lora_world import KINDS, NUM_TOKENS, lora_world, write_adapter
from tests.runtime.models import engine_config, greedy_params, new_engine, random_model
from wingbeat.deployments.fleet.catalog import VARIANTS
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.lora.fleet import AdapterRefused, FleetAdapters
from wingbeat.deployments.lora.keeper import AdapterKeeper
from wingbeat.runtime.scheduling.request import Request


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's adapters, a damaged one, and one of too high a rank."""
    root = tmp_path_factory.mktemp("adapters")
    for kind, made in zip(KINDS, lora_world().folders[1:], strict=True):
        shutil.copytree(made, root / kind)
    shutil.copytree(root / "all", root / "damaged")
    (root / "damaged" / "adapter_model.safetensors").write_bytes(b"nothing")
    write_adapter(root / "high", random_model("llama"), rank=32)
    return root


def engine_in(folder: Path):
    """Create an engine with room for adapters, for `LocalEngines`."""

    def make(round_s: float):
        engine = new_engine(lora_world().loaded, engine_config(max_num_seqs=4))
        engine.keepers = {VARIANTS: AdapterKeeper(engine.loaded.parts["adapters"], folder)}
        return engine

    return make


def requests(pool: EnginePool, kind: str, count: int = 4) -> list[Request]:
    adapter = pool.variants.find(kind)
    return [
        replace(Request(f"{kind} {index}", tuple(prompt), greedy_params(NUM_TOKENS)), variant=adapter)
        for index, prompt in enumerate(lora_world().prompts[:count])
    ]


def expected(kind: str, count: int = 4) -> list[tuple[int, ...]]:
    return [tuple(text) for text in lora_world().expected[1 + list(KINDS).index(kind)][:count]]


def test_loading_and_unloading_under_traffic_loses_nothing(folder):
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await FleetAdapters(pool).load("all", "all")
        first = [asyncio.create_task(collect(pool, request)) for request in requests(pool, "all", 6)]
        await asyncio.sleep(0.02)
        await FleetAdapters(pool).load("attention", str(folder / "attention"))
        second = [asyncio.create_task(collect(pool, request)) for request in requests(pool, "attention")]
        await FleetAdapters(pool).delete("all")
        assert pool.variants.find("all") is None
        await FleetAdapters(pool).load("plain", "plain")
        third = [asyncio.create_task(collect(pool, request)) for request in requests(pool, "plain")]
        done = [[tokens(outputs) for outputs in await asyncio.gather(*tasks)] for tasks in (first, second, third)]
        assert done == [expected("all", 6), expected("attention"), expected("plain")]

    run(scenario, "a", engine=engine_in(folder))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("../elsewhere", "../elsewhere is not below lora_update_dir"),
        ("/etc", "/etc is not below lora_update_dir"),
        ("nowhere", "there is no folder"),
        ("damaged", "is truncated or damaged"),
        ("high", "has rank 32, max_lora_rank is 8"),
    ],
)
def test_what_engines_cannot_serve_is_not_listed(folder, path, problem):
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        with pytest.raises(AdapterRefused, match=problem):
            await FleetAdapters(pool).load("new", path)
        assert pool.variants.things == ()

    run(scenario, "a", engine=engine_in(folder))
