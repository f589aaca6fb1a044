"""Every engine has its own copy of every saved prefix, whichever router made it and whichever engine comes later."""

import asyncio

import pytest

from tests.deployments.pool_world import LocalEngines, collect, run, tokens, until
from tests.runtime.models import PROMPT_LENS, engine_config, greedy_params, new_engine, random_prompts, reference
from tests.runtime.prefix_world import SMALL, store_of
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import EngineUnavailable
from wingbeat.deployments.prefixes.fleet import FleetPrefixes, PrefixRefused
from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import Request

PROMPT = tuple(random_prompts(PROMPT_LENS)[4])
PREFIX = SavedPrefix("system", 0, PROMPT[:42])


def keeping_engine(round_s: float = 0.0, folder=None):
    """A tiny Llama; it has no drafter, so that several may share its weights."""
    engine = new_engine(reference("llama").loaded, engine_config(**SMALL))
    engine.keepers = {"prefixes": PrefixKeeper(engine, None if folder is None else store_of(folder))}
    return engine


prefixes = FleetPrefixes


def names(source: LocalEngines, engine_id: str) -> list[str]:
    return [one["name"] for one in source.engines[engine_id].keepers["prefixes"].describe()["prefixes"]]


def test_every_engine_pins_its_own_and_every_router_knows_the_name():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        other = EnginePool(source, max_num_seqs=16, max_queued_requests=16)
        await other.start()
        await until(lambda: len(other.loads()) == 2)
        saved = await prefixes(pool).save(PREFIX)
        assert (names(source, "a"), names(source, "b")) == (["system"], ["system"])
        await until(lambda: prefixes(other).catalog.find("system") == saved)
        await prefixes(other).delete("system")
        assert (names(source, "a"), names(source, "b")) == ([], [])
        await until(lambda: prefixes(pool).catalog.find("system") is None)
        await other.close()

    run(scenario, "a", "b", engine=keeping_engine)


def test_an_engine_that_comes_later_computes_what_the_others_have():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.announce("a")
        await until(lambda: len(pool.loads()) == 1)
        await prefixes(pool).save(PREFIX)
        assert names(source, "b") == []
        source.announce("a", "b")
        await until(lambda: names(source, "b") == ["system"])

    run(scenario, "a", "b", engine=keeping_engine)


def test_a_request_behind_a_prefix_hits_it_in_whichever_engine_it_runs():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        await prefixes(pool).save(PREFIX)
        requests = [Request(f"{number}", PROMPT, greedy_params(20)) for number in range(4)]
        outputs = await asyncio.gather(*(collect(pool, request) for request in requests))
        assert {tokens(output) for output in outputs} == {tuple(reference("llama").continuations[4][:20])}
        assert {output[-1].num_cached_tokens for output in outputs} == {40}
        assert {output[-1].engine_id for output in outputs} == {"a", "b"}

    run(scenario, "a", "b", engine=keeping_engine)


def test_what_one_engine_cannot_keep_none_keeps():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.engines["b"].keepers["prefixes"].max_blocks = 3
        with pytest.raises(PrefixRefused, match="needs 40 more pinned tokens: 12 of 12"):
            await prefixes(pool).save(PREFIX)
        assert prefixes(pool).catalog.find("system") is None
        await until(lambda: source.engines["a"].stats().num_pinned_blocks == 0)
        await until(lambda: not source.engines["a"].has_unfinished_requests())

    run(scenario, "a", "b", engine=keeping_engine)


def test_an_engine_that_is_lost_meanwhile_is_told_and_nothing_is_kept():
    async def scenario(source: LocalEngines, pool: EnginePool) -> None:
        source.kill("b")
        with pytest.raises(EngineUnavailable):
            await prefixes(pool).save(PREFIX)
        assert prefixes(pool).catalog.find("system") is None

    run(scenario, "a", "b", engine=keeping_engine)


def test_a_new_engine_reads_the_folder_and_what_its_replica_knows_is_later(tmp_path):
    def keeping(round_s: float = 0.0):
        return keeping_engine(folder=tmp_path)

    async def first(source: LocalEngines, pool: EnginePool) -> None:
        for name in ("system", "gone"):
            await prefixes(pool).save(PREFIX._replace(name=name))
        assert (await prefixes(pool).describe())[0]["prefixes"][0]["saved"] == str(tmp_path / "system.safetensors")
        assert (await prefixes(pool).stored("system")).token_ids == PREFIX.token_ids

    async def second(source: LocalEngines, pool: EnginePool) -> None:
        source.names["a"].catalogs["prefixes"].put("gone", None)
        client = source.loops["a"].client
        found = await client.call("open_names", "prefixes", source.names["a"].catalogs["prefixes"].changes())
        assert [name for name, _, _ in found] == ["gone", "system"]
        source.names["a"].catalogs["prefixes"].merge(found)
        assert [prefix.name for prefix in source.names["a"].catalogs["prefixes"].things] == ["system"]
        assert names(source, "a") == ["system"]
        source.engines["a"].keepers["prefixes"].close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["system.json", "system.safetensors"]

    run(first, "a", engine=keeping)
    run(second, "a", engine=keeping)
