"""What LoRA adapters cost: sixteen requests at once with eight adapters mixed, beside one adapter and none.

    .venv/bin/python benchmarks/adapters.py [--model DIR --drafter DIR] [--rank N] [--repeats N]

In process, one thread, greedy, adapters of random weights on every linear layer. Every text is held against that of the
same model with the adapter merged into its weights. Modes take turns; figures are medians, and ratios are of a turn.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, greedy, quiet
from report import Report, Table, machine_facts, model_facts
from safetensors.torch import save_file
from torch import nn
from workload import describe, held_out_prompts

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.lora.adapter_files import read_adapter
from wingbeat.runtime.lora.resident import AdapterName
from wingbeat.runtime.scheduling.request import Request, SamplingParams

BATCH, NUM_ADAPTERS = 16, 8
NO_ROOM, NONE, ONE, MIXED = "no adapter setting", "no adapter", "one adapter", f"{NUM_ADAPTERS} adapters mixed"
MODES = (NO_ROOM, NONE, ONE, MIXED)


class Turn(NamedTuple):
    """All requests of one mode, run to their ends."""

    elapsed_s: float
    token_ids: list[list[int]]


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.max_tokens = 1, 8
    quiet()
    pair = chosen_pair(args)
    plain, adapted = open_engine(pair, args.rank, 0), open_engine(pair, args.rank, NUM_ADAPTERS)
    prompts = held_out_prompts(plain.tokenizer, args.corpus, BATCH)
    token_ids = [prompt.token_ids for prompt in prompts]
    rows, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        names = [write_adapter(adapted, Path(folder) / f"{seed}", args.rank, seed) for seed in range(NUM_ADAPTERS)]
        for speculation in (False, True):
            params = greedy(args.max_tokens, speculation)
            turns = {mode: [] for mode in MODES}
            for _ in range(args.repeats + 1):
                for mode in MODES:
                    turns[mode].append(
                        run(plain if mode == NO_ROOM else adapted, token_ids, params, users(mode, names))
                    )
            wrong = num_wrong(adapted, token_ids, params, names, turns[MIXED][-1].token_ids)
            name = "speculating" if speculation else "plain"
            figures[name] = {"wrong": wrong} | {mode: [turn.elapsed_s for turn in turns[mode][1:]] for mode in MODES}
            rows += [row(name, mode, figures[name], BATCH * args.max_tokens, wrong) for mode in MODES]
    columns = ("", "tokens/s", f"/ {NO_ROOM}", "texts unlike the merged model's")
    note = f"Adapters of rank {args.rank} on every linear layer of the decoder layers; the drafter has none."
    facts = machine_facts() | model_facts(*pair) | {"prompts": describe(prompts)}
    table = Table(f"{BATCH} requests at once, greedy, {args.max_tokens} tokens each", columns, rows, note)
    report = Report("LoRA adapters", facts, [table], figures)
    report.finish(args, "adapters")


def open_engine(pair: Pair, rank: int, max_loras: int) -> LLM:
    """An engine without a prefix cache and with room for so many adapters."""
    shape = SpeculationConfig.default("cpu")
    per_seq = EngineConfig(max_model_len=MAX_MODEL_LEN, speculation=shape).max_blocks_per_seq
    config = EngineConfig(
        max_num_seqs=BATCH,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=1 + BATCH * per_seq,
        enable_prefix_caching=False,
        speculation=shape,
        max_loras=max_loras,
        max_lora_rank=rank,
    )
    return LLM(*pair, config, InProcessChannel, device="cpu", threads=1)


def users(mode: str, names: list[AdapterName]) -> list[AdapterName | None]:
    """The adapter of each request."""
    if mode == MIXED:
        return [names[index % NUM_ADAPTERS] for index in range(BATCH)]
    return [names[0] if mode == ONE else None] * BATCH


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams, adapters: list[AdapterName | None]) -> Turn:
    """All prompts at once."""
    texts: list[list[int]] = [[] for _ in prompts]
    started = time.perf_counter()
    for index, (prompt, adapter) in enumerate(zip(prompts, adapters, strict=True)):
        llm.engine.add_request(Request(str(index), tuple(prompt), params, adapter=adapter))
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.failure is not None:
                raise RuntimeError(output.failure)
            texts[int(output.request_id)] += output.token_ids
    return Turn(time.perf_counter() - started, texts)


def linears(llm: LLM) -> dict[str, nn.Linear]:
    """Those of the decoder layers, by their paths."""
    loaded = llm.engine.loaded
    inside = {id(module) for layer in loaded.decoder_layers for module in layer.modules()}
    named = loaded.model.named_modules()
    return {name: one for name, one in named if isinstance(one, nn.Linear) and id(one) in inside}


def write_adapter(llm: LLM, folder: Path, rank: int, seed: int) -> AdapterName:
    """An adapter of random weights that changes texts and leaves them text."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, linear in linears(llm).items():
        prefix, spread = f"base_model.model.{name}.lora_", linear.weight.std().item()
        tensors[f"{prefix}A.weight"] = torch.randn(rank, linear.in_features, generator=generator) * spread
        tensors[f"{prefix}B.weight"] = torch.randn(linear.out_features, rank, generator=generator) * 0.1
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return llm.engine.loaded.adapters.inspect(folder.name, folder)


def num_wrong(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, names: list[AdapterName], texts: list[list[int]]
) -> int:
    """Texts of the mixed batch that the models with the adapters merged write otherwise."""
    wrong = 0
    for number, name in enumerate(names):
        with merged(llm, name):
            own = run(llm, prompts, params, [None] * BATCH).token_ids
        wrong += sum(own[index] != texts[index] for index in range(number, BATCH, NUM_ADAPTERS))
    return wrong


@contextmanager
def merged(llm: LLM, name: AdapterName) -> Iterator[None]:
    """The base model's weights with an adapter in them."""
    adapters = llm.engine.loaded.adapters
    parts, before = linears(llm), {}
    with torch.inference_mode():
        for path, (a, b) in read_adapter(Path(name.path), adapters.linears, adapters.max_rank).items():
            before[path] = parts[path].weight.clone()
            parts[path].weight += b @ a
        yield
        for path, weight in before.items():
            parts[path].weight.copy_(weight)


def row(name: str, mode: str, figures: dict, num_tokens: int, wrong: int) -> tuple[str, ...]:
    """A line of the table."""
    ratios = [base / own for base, own in zip(figures[NO_ROOM], figures[mode], strict=True)]
    per_s = num_tokens / statistics.median(figures[mode])
    compared = f"{wrong} of {BATCH}" if mode == MIXED else ""
    return f"{name}, {mode}", f"{per_s:.0f}", f"{statistics.median(ratios):.2f}", compared


if __name__ == "__main__":
    main()
