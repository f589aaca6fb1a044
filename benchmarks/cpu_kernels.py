"""Engines on the CPU with and without Wingbeat's own kernels, in this process: tokens per second.

Two models: the demo pair, plain and speculating, and a random model of eight layers, which has no useful drafter and
drafts by n-grams. The engines take turns; their texts must be equal.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from local_engine import Pair, generate, greedy, open_llm, quiet
from report import Report, Table, machine_facts, middle, spread
from transformers import LlamaConfig, LlamaForCausalLM
from workload import held_out_prompts

from wingbeat.kernels.cpu.ops import use_kernels
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.standard_library import stdlib_root

BATCHES = (1, 4, 16)
PROMPT_TOKENS = 128
WAYS = {"plain": False, "speculating": True}
KERNELS = {"with": True, "without": False}


@contextmanager
def kernels(way: str) -> Iterator[None]:
    """Enables or disables the CPU kernels."""
    before = use_kernels(KERNELS[way])
    try:
        yield
    finally:
        use_kernels(before)


def random_pair(folder: Path) -> Pair:
    """Creates a model of eight layers of width 256 with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return Pair(folder, "ngram")


def rates(engines: dict[str, LLM], prompts: list[list[int]], max_tokens: int, speculating: bool, repeats: int) -> dict:
    """Tokens per second of each engine, by repeat.

    Raises:
        RuntimeError: the engines' texts differ.
    """
    params, found = greedy(max_tokens, speculating), {way: [] for way in engines}
    for number in range(1 + repeats):
        texts = []
        for way, llm in engines.items():
            with kernels(way):
                result = generate(llm, prompts, params)
            texts.append(result.token_ids)
            if number:
                found[way].append(result.tokens_per_s)
        if texts[0] != texts[1]:
            raise RuntimeError("texts with and without the kernels differ")
    return found


def prompts_of(llm: LLM) -> list[list[int]]:
    """Prompts of held-out text if the model has a tokenizer, else of random tokens."""
    count = max(BATCHES)
    if llm.tokenizer is None:
        return torch.randint(4096, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    texts = held_out_prompts(llm.tokenizer, stdlib_root(), 4 * count)
    return [prompt.token_ids[-PROMPT_TOKENS:] for prompt in texts if len(prompt.token_ids) >= PROMPT_TOKENS][:count]


def measure(name: str, pair: Pair, threads: int, repeats: int, max_tokens: int) -> tuple[list[tuple], list[dict]]:
    """Measures one model; returns table rows and figures."""
    engines = {}
    for way in KERNELS:
        with kernels(way):
            engines[way] = open_llm(pair, max_num_seqs=max(BATCHES), threads=threads)
    prompts = prompts_of(engines["with"])
    rows, figures = [], []
    for label, speculating in WAYS.items():
        for batch in BATCHES:
            found = rates(engines, prompts[:batch], max_tokens, speculating, repeats)
            ratios = [new / old for new, old in zip(found["with"], found["without"], strict=True)]
            rows.append(
                (f"{name}, {label}, {batch}", *(spread(found[way]) for way in ("without", "with")), spread(ratios, 2))
            )
            figures.append({"model": name, "way": label, "batch": batch, "ratio": middle(ratios), **found})
    return rows, figures


def main() -> None:
    """Parses options and runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of both engines; 0 lets each engine choose by measurement"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few short requests: shows that it runs, measures nothing"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    quiet()
    repeats, max_tokens = (1, 8) if args.quick else (args.repeats, args.max_tokens)
    demo = demo_pair()
    rows, figures = [], []
    with TemporaryDirectory() as folder:
        pairs = {"demo pair": Pair(demo.verifier, demo.drafter), "8 layers of 256": random_pair(Path(folder))}
        for name, pair in pairs.items():
            more_rows, more = measure(name, pair, args.threads, repeats, max_tokens)
            rows, figures = rows + more_rows, figures + more
    facts = machine_facts() | {
        "workload": f"{PROMPT_TOKENS} prompt tokens (random for the random model), {max_tokens} greedy ones at once",
        "threads": str(args.threads),
    }
    columns = ("tokens/s: model, way, requests", "without kernels", "with", "with / without")
    note = "Medians and ranges over repeats, which take turns."
    report = Report("Kernels of the CPU", facts, [Table("Kernels of the CPU", columns, rows, note)], {"runs": figures})
    report.finish(args, "cpu_kernels")


if __name__ == "__main__":
    main()
