"""Schedulers without a model, and rounds of scripted tokens."""

from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.kv.blocks import BlockManager
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.scheduling.scheduler import Scheduler


def make(eos=(), seats=None, **fields):
    defaults = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 16, "block_size": 4}
    config = EngineConfig(**(defaults | {"num_kv_blocks": 100} | fields))
    manager = BlockManager(config.num_kv_blocks, config.block_size, config.enable_prefix_caching)
    return Scheduler(config, manager, frozenset(eos), seats)


def request(name, prompt_len, max_tokens=8, **fields):
    prompt = tuple(100 * (ord(name[0]) - 96) + index for index in range(prompt_len))
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, **fields))


def names(sequences):
    return [seq.request.request_id for seq in sequences]


def play(scheduler, plan, token=7, held=()):
    """Launch and answer a round: decodes and finished prompts get a token each. `held` blocks are the test's own."""
    scheduler.advance(plan, with_trees=False)
    decodes = [(seq, [token]) for seq in plan.decodes]
    chunks = [(chunk, [token] if chunk.samples else []) for chunk in plan.chunks]
    outputs = scheduler.update(decodes, chunks)
    scheduler.block_manager.check_integrity([held, *(seq.blocks for seq in scheduler.running)])
    return outputs
