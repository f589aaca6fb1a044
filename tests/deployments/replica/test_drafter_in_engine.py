"""A drafter that is a part of its engine: the same texts, and the engine ends with it."""

import asyncio
import os
from functools import cache

import pytest
from transformers import AutoModelForCausalLM

from tests.deployments.pool_world import collect, tokens
from tests.deployments.replica_world import pool_of
from tests.optional import FEATURES, is_deleted
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.interface import EnginesEnded
from wingbeat.deployments.replica.engine.build import build_draft_worker
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.scheduling.request import Request, SamplingParams

SETTINGS = {"drafter": "auto", "drafter_place": "engine", "max_model_len": 256, "num_kv_blocks": 80, "threads": 1}
SHAPES = {"chain": {"draft_steps": 4, "draft_top_k": 1}, "tree": {"draft_steps": 4, "draft_top_k": 4}}
PROMPTS = [tuple(range(3 + number, 40 + 2 * number)) for number in range(2)]
NUM_TOKENS = 24
POISON = 11
"""A token whose context breaks the drafter."""


def build_breakable(config: AppConfig) -> DraftWorker:
    """The demo's drafter, which raises at a prompt that begins with `POISON`."""
    worker = build_draft_worker(config)
    draft = worker.run_once

    def run_once() -> bool:
        for end in worker.ends:
            if (end.token_ids[:, 0] == POISON).any():
                raise RuntimeError("the drafter is broken")
        return draft()

    worker.run_once = run_once
    return worker


def request(name: str, prompt: tuple[int, ...], **fields) -> Request:
    return Request(name, prompt, SamplingParams(NUM_TOKENS, **({"temperature": 0.0, "ignore_eos": True} | fields)))


@cache
def written(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """By generate()."""
    import torch

    model = AutoModelForCausalLM.from_pretrained(demo_pair().verifier, dtype=torch.float32)
    ids = torch.tensor([prompt])
    plain = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False}
    return tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **plain)[0, len(prompt) :].tolist())


@pytest.mark.parametrize("shape", ["tree", pytest.param("chain", marks=pytest.mark.slow)])
def test_texts_are_those_of_generate_and_seeded_ones_those_of_plain_decoding(shape: str):
    expected = [written(prompt) for prompt in PROMPTS]

    async def scenario() -> None:
        async with pool_of("a", **SETTINGS, **SHAPES[shape], adaptive=False) as pool:
            sent = [request(f"greedy {number}", prompt) for number, prompt in enumerate(PROMPTS)]
            sampled = {"temperature": 0.8, "seed": 5}
            sent.append(request("drafted", PROMPTS[0], **sampled))
            sent.append(request("plain", PROMPTS[0], speculation=False, **sampled))
            got = await asyncio.gather(*(collect(pool, one) for one in sent))
            *greedy, drafted, plain = map(tokens, got)
            assert greedy == expected
            assert drafted == plain
            replica = pool.replicas["a"]
            stats, report = await replica.stats(), await replica.report()
            assert stats["drafter_state"] == "attached"
            assert stats["speculation"]["num_accepted_tokens"] > 0
            assert (report["drafter_place"], report["channel"]) == ("engine", None)
            assert is_deleted(FEATURES["engine_checks"]) or report["self_test"]["acceptance_length"] > 1
            assert stats["drafter_pid"] == stats["engine_pid"]

    asyncio.run(asyncio.wait_for(scenario(), 240))


@pytest.mark.slow
def test_what_breaks_the_drafter_breaks_the_engine_and_its_neighbours_texts_are_as_ever(caplog):
    factory = f"{__name__}:build_breakable"

    async def scenario() -> None:
        async with pool_of("a", engine_wait_s=240, **SETTINGS, drafter_factory=factory, adaptive=False) as pool:
            before = (await pool.replicas["a"].stats())["engine_pid"]
            others = [asyncio.create_task(collect(pool, request(f"by {n}", one))) for n, one in enumerate(PROMPTS)]
            with pytest.raises(EnginesEnded, match="engines in a row"):
                await collect(pool, request("poison", (POISON, *PROMPTS[0])))
            assert [tokens(await other) for other in others] == [written(prompt) for prompt in PROMPTS]
            stats = await pool.replicas["a"].stats()
            assert stats["engine_pid"] != before != os.getpid()
            assert stats["num_engine_restarts"] > 0
            assert stats["drafter_state"] == "attached"
            assert "the engine failed: the drafter failed: RuntimeError: the drafter is broken" in caplog.text

    asyncio.run(asyncio.wait_for(scenario(), 240))
