"""Whether requests in half precision get the same tokens regardless of the other requests in their rounds.

    .venv/bin/python benchmarks/same_tokens.py [--requests 2000] [--dtype bfloat16] [--quick]

Each request is first decoded alone and plainly. Then it is decoded again among others: trees of 1 node (speculation
off) to 64, 1 to 64 concurrent sequences, prompts in small chunks, cached prefixes, and a KV pool so small that
sequences are preempted. Counts the differing requests, and records where they first differ. Requests are greedy,
sampled, and sampled with top-k and top-p, each with its own seed. The second table has the times of passes in each
mode.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
from local_engine import quiet
from report import RESULTS, Report, Table, machine_facts, middle
from told_drafter import ToldDrafter
from transformers import AutoModelForCausalLM, LlamaConfig

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.corpus import read_text, split_files
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.base import Drafter, DrafterOptions
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.kv.pool import KVCache
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.round.builder import dummy_decode_batch
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model, prepare_model
from wingbeat.runtime.verifier.model import VerifierModel

TREES, BATCHES = (1, 2, 8, 16, 32, 64), (1, 4, 16, 64)
MODES = ("default", "deterministic")
NUM_TOKENS, PROMPT_LENS, MAX_MODEL_LEN, BLOCK_SIZE = 24, (6, 90), 128, 16
SHARED_LEN = 40
"""Length of the common beginning of every third prompt, which the prefix cache finds."""
SPEED_ROWS = (1, 4, 16, 64, 256)
SPEED_SHAPES = {"512 x 8 layers": (512, 8), "1024 x 4 layers": (1024, 4), "2048 x 2 layers": (2048, 2)}


class Cell(NamedTuple):
    """Parameters of the second decoding."""

    tree: int
    """Nodes verified per sequence, including the root; 1 disables speculation."""
    batch: int


class Difference(NamedTuple):
    """A request whose tokens differ from those that it got alone."""

    cell: Cell
    kind: str
    at: int
    """Index of the first token that differs."""


class Pair(NamedTuple):
    """A verifier, and a factory of its drafter."""

    name: str
    loaded: LoadedModel
    drafter: object
    """(speculation, texts decoded alone) -> Drafter."""
    prompts: list[list[int]]


def demo(mode: str, dtype: torch.dtype, count: int) -> Pair:
    """The demo pair, drafting with its EAGLE head; prompts from the standard library's text."""
    folders = demo_pair()
    target = TargetDescription.from_checkpoint(folders.verifier)
    tokenizer = Tokenizer.find(folders.verifier)
    files = split_files(stdlib_root()).held_out
    texts = [ids for path in files[:60] if len(ids := tokenizer.encode(read_text(path) or "")) > 2 * PROMPT_LENS[1]]

    def drafter(speculation: SpeculationConfig, sequences: list[list[int]]) -> Drafter:
        return load_drafter(folders.drafter, target, speculation, DrafterOptions(dtype))

    return Pair("demo pair", load(folders.verifier, mode, dtype), drafter, prompts_of(texts, count))


def untrained(mode: str, dtype: torch.dtype, count: int) -> Pair:
    """A model of random weights, with a drafter that is given the model's text and mixes it with wrong tokens."""
    model, vocab_size = random_llama(256, 12, 997, dtype), 997
    chance = random.Random(2)
    texts = [[chance.randrange(vocab_size) for _ in range(400)] for _ in range(50)]
    prompts = prompts_of(texts, count)
    loaded = prepare(model, mode)
    return Pair(
        "random model of 12 layers", loaded, lambda speculation, sequences: ToldDrafter(sequences, vocab_size), prompts
    )


def random_llama(hidden: int, num_layers: int, vocab_size: int, dtype: torch.dtype) -> torch.nn.Module:
    """Random model; its weights are large enough that some tokens stand out."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(hidden // 256, 1),
        head_dim=64,
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        initializer_range=hidden**-0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def load(folder: Path, mode: str, dtype: torch.dtype) -> LoadedModel:
    """Loads a checkpoint in one mode."""
    return load_model(folder, dtype, torch.device("cpu"), deterministic=mode == "deterministic")


def prepare(model: torch.nn.Module, mode: str) -> LoadedModel:
    """Prepares a model in one mode."""
    return prepare_model(model, "random", deterministic=mode == "deterministic")


def prompts_of(texts: list[list[int]], count: int) -> list[list[int]]:
    """Pieces of texts; every third one begins with the same tokens."""
    chance, prompts = random.Random(1), []
    for index in range(count):
        text = chance.choice(texts)
        begin, length = chance.randrange(len(text) // 2), chance.randint(*PROMPT_LENS)
        piece = text[begin : begin + length]
        prompts.append((texts[0][:SHARED_LEN] + piece)[: PROMPT_LENS[1]] if index % 3 == 0 else piece)
    return prompts


def params_of(index: int, speculation: bool) -> tuple[str, SamplingParams]:
    """Kind and parameters of a request: a quarter greedy, a half sampled, a quarter with top-k and top-p."""
    fields = {"max_tokens": NUM_TOKENS, "seed": 1000 + index, "ignore_eos": True, "speculation": speculation}
    if index % 4 == 0:
        return "greedy", SamplingParams(temperature=0.0, **fields)
    if index % 4 == 1:
        return "top-k, top-p", SamplingParams(temperature=0.9, top_k=50, top_p=0.9, **fields)
    return "sampled", SamplingParams(temperature=1.0, **fields)


def decode(
    pair: Pair, indices: list[int], cell: Cell | None, sequences: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Decodes some requests; returns their tokens and the number of preemptions.

    Args:
        cell: None decodes each request alone and plainly, with whole prompts and nothing cached.
    """
    alone = cell is None
    batch = 1 if alone else cell.batch
    speculation = SpeculationConfig(draft_steps=7, draft_top_k=min(8, max((0 if alone else cell.tree) // 4, 1)))
    if not alone and cell.tree > 1:
        speculation = SpeculationConfig(7, speculation.draft_top_k, cell.tree)
    whole = EngineConfig(max_model_len=MAX_MODEL_LEN, speculation=speculation).max_blocks_per_seq
    # Room for two fifths of the sequences at their longest, so that some are preempted.
    blocks = 1 + whole if batch == 1 else 1 + max(whole, 2 * batch * (MAX_MODEL_LEN // BLOCK_SIZE) // 5)
    config = EngineConfig(
        max_num_seqs=batch,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=512 if alone else 48,
        num_kv_blocks=blocks,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=not alone,
        deterministic=pair.loaded.deterministic,
        speculation=speculation,
    )
    speculates = not alone and cell.tree > 1
    engine = build_engine(
        pair.loaded, config, pair.drafter(speculation, sequences) if speculates else None, InProcessChannel
    )
    for index in indices:
        engine.add_request(Request(str(index), tuple(pair.prompts[index]), params_of(index, speculates)[1]))
    found: dict[int, list[int]] = {index: [] for index in indices}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.failure is not None:
                raise RuntimeError(output.failure)
            found[int(output.request_id)] += output.token_ids
    engine.model.remove_taps()
    return [found[index] for index in indices], engine.stats().num_preemptions


class Counted(NamedTuple):
    """Results of one pair in one mode."""

    num_requests: int
    num_preemptions: int
    differences: list[Difference]

    @classmethod
    def read(cls, fields: list) -> "Counted":
        """Restores results from their JSON form."""
        num_requests, num_preemptions, differences = fields
        return cls(num_requests, num_preemptions, [Difference(Cell(*cell), kind, at) for cell, kind, at in differences])


def count(pair: Pair) -> Counted:
    """Decodes every request alone, then in its cell."""
    cells = [Cell(tree, batch) for batch in BATCHES for tree in TREES]
    every = list(range(len(pair.prompts)))
    alone, _ = decode(pair, every, None, [])
    sequences = [prompt + text for prompt, text in zip(pair.prompts, alone, strict=True)]
    differences, num_preemptions = [], 0
    for number, cell in enumerate(cells):
        indices = every[number :: len(cells)]
        texts, preempted = decode(pair, indices, cell, sequences)
        num_preemptions += preempted
        for index, text in zip(indices, texts, strict=True):
            if text != alone[index]:
                at = next(at for at, (one, other) in enumerate(zip(alone[index], text, strict=True)) if one != other)
                differences.append(Difference(cell, params_of(index, False)[0], at))
        print(f"{pair.name}: trees of {cell.tree}, {cell.batch} at once: {len(differences)} differ so far", flush=True)
    return Counted(len(every), num_preemptions, differences)


def table_of(found: dict[tuple[str, str], Counted]) -> Table:
    """Table of differences by pair and mode."""
    rows = []
    for (name, mode), counted in found.items():
        different = counted.differences
        rows.append(
            (
                f"{name}, {mode}",
                f"{counted.num_requests - len(different)} of {counted.num_requests}",
                f"{100 * len(different) / counted.num_requests:.1f} %",
                f"{sum(one.cell.tree == 1 for one in different)}",
                f"{sum(one.cell.batch == 1 for one in different)}",
                f"{middle([one.at for one in different]):.0f}" if different else "",
                f"{counted.num_preemptions}",
            )
        )
    columns = ("", "same tokens", "differ", "of these plain", "alone", "first at, median", "preemptions")
    return Table("Requests decoded alone and plainly, then among others", columns, rows)


@torch.inference_mode()
def seconds_of(loaded: LoadedModel) -> dict[int, object]:
    """Functions that run a pass, by number of rows; each row is one token of a sequence."""
    most = max(SPEED_ROWS)
    config = EngineConfig(max_num_seqs=most, max_model_len=256, num_kv_blocks=32)
    cache, model = KVCache(loaded.layers, config, loaded.dtype, loaded.device), VerifierModel(loaded)

    def of(num_rows: int) -> object:
        batch = dummy_decode_batch(cache, num_rows, 1, 16)
        return lambda: model(batch)

    return {num_rows: of(num_rows) for num_rows in SPEED_ROWS}


@torch.inference_mode()
def speed(dtype: torch.dtype, turns: int) -> tuple[Table, dict[str, object]]:
    """Times passes by rows, in turns; returns a table of minima and mode ratios, and the figures."""
    rows, figures = [], {}
    shapes = {"demo": None} | SPEED_SHAPES
    for name, shape in shapes.items():
        ways = {}
        for mode in MODES:
            loaded = (
                load(demo_pair().verifier, mode, dtype)
                if shape is None
                else prepare(random_llama(*shape, 4096, dtype), mode)
            )
            ways[mode] = seconds_of(loaded)
        least = {mode: dict.fromkeys(SPEED_ROWS, float("inf")) for mode in MODES}
        for _ in range(turns):
            for num_rows in SPEED_ROWS:
                for mode in MODES:
                    started = time.perf_counter()
                    ways[mode][num_rows]()
                    least[mode][num_rows] = min(least[mode][num_rows], time.perf_counter() - started)
        figures[name] = least
        cells = [
            f"{1e3 * least['deterministic'][n]:.2f} / {1e3 * least['default'][n]:.2f} = "
            f"{least['deterministic'][n] / least['default'][n]:.2f}"
            for n in SPEED_ROWS
        ]
        rows.append((name, *cells))
    columns = ("", *(f"{n} rows" for n in SPEED_ROWS))
    return Table("A pass, ms: deterministic / default = ratio", columns, rows), figures


def main() -> None:
    """Counts differences, then measures times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument(
        "--default-requests", type=int, default=480, help="requests in the default mode, which is slower here"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--pair",
        nargs="*",
        choices=("demo", "random"),
        default=["demo", "random"],
        help="pairs to count; an empty list skips counting",
    )
    parser.add_argument("--keep", action="store_true", help="keep the results of other pairs and modes in --output")
    parser.add_argument("--no-speed", action="store_true", help="skip the timing")
    parser.add_argument(
        "--quick", action="store_true", help="few requests: checks that the script works, measures nothing"
    )
    parser.add_argument("--output", type=Path, default=RESULTS / "same_tokens.json")
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    dtype, found, seconds = getattr(torch, args.dtype), {}, {}
    if args.keep and args.output.is_file():
        kept = json.loads(args.output.read_text())["figures"]
        found = {tuple(name.split(", ")): Counted.read(fields) for name, fields in kept["requests"].items()}
    for make in [{"demo": demo, "random": untrained}[name] for name in args.pair]:
        for mode in args.mode:
            num_requests = {"default": args.default_requests, "deterministic": args.requests}[mode]
            pair = make(mode, dtype, 48 if args.quick else num_requests)
            found[pair.name, mode] = count(pair)
    tables = [table_of(found)]
    if not args.no_speed:
        table, seconds = speed(dtype, 3 if args.quick else 20)
        tables.append(table)
    facts = machine_facts() | {
        "dtype": args.dtype,
        "threads": "1",
        "requests": f"{NUM_TOKENS} tokens each, prompts of {PROMPT_LENS[0]} to "
        f"{PROMPT_LENS[1]} tokens; trees of {', '.join(map(str, TREES))} nodes times "
        f"{', '.join(map(str, BATCHES))} sequences at once",
    }
    figures = {
        "requests": {f"{name}, {mode}": counted for (name, mode), counted in found.items()},
        "seconds": seconds,
    }
    report = Report("The same tokens in half precision", facts, tables, figures)
    report.show()
    if not args.quick:
        report.save(args.output)


if __name__ == "__main__":
    main()
