"""Every kind of drafter on one verifier: acceptance, and cost of drafting.

    .venv/bin/python benchmarks/drafters.py [--model DIR --drafter DIR] [--other NAME=DIR] [--draft-model DIR]

In process, one thread, chains of 5 (`--steps`), one request at a time. Three workloads: pieces of held-out files; the
same requests a second time, as retries and agents send them; and the pieces sampled at temperature 1. Every repeat
opens its engines anew, because a drafter that learns from outputs must not have seen them; the kinds take turns, and
figures are medians over the repeats.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from local_engine import (
    Pair,
    add_model_options,
    add_other_drafters,
    chosen_drafters,
    chosen_pair,
    generate,
    greedy,
    open_llm,
    quiet,
    sampled,
)
from report import Report, Table, machine_facts, middle, model_facts, spread
from workload import Prompt, describe, held_out_prompts

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.demo import DEMO_FOLDER
from wingbeat.runtime.drafters.choice import KINDS, TEXT_DRAFTERS
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.tokenizer import Tokenizer

PLAIN = "none"
HELD_OUT, SAMPLED, AGAIN = "held-out text", "held-out text, sampled", "the same requests again"
WORKLOADS = ({HELD_OUT: 0.0, AGAIN: 0.0}, {SAMPLED: 1.0})
"""Temperature by workload; workloads of one group run on the same engines."""


class Run(NamedTuple):
    """A run of a kind of drafter on a workload."""

    tokens_per_s: float
    draft_ms: float
    """Time waited for the drafter per verified draft, in ms."""
    speculation: SpeculationMetrics

    @property
    def accepted_per_draft_ms(self) -> float:
        """Accepted draft tokens per millisecond waited for the drafter."""
        return (self.speculation.acceptance_length - 1) / self.draft_ms if self.draft_ms else 0.0


def run_once(llm: LLM, prompts: list[Prompt], max_tokens: int, temperature: float) -> Run:
    """Runs every prompt by itself."""
    waited_s = llm.engine.stats().phases.draft_wait_s
    done = generate(llm, [prompt.token_ids for prompt in prompts], sampled(max_tokens, temperature), batch_size=1)
    waited_s = llm.engine.stats().phases.draft_wait_s - waited_s
    num_drafts = done.metrics.num_drafts
    return Run(done.tokens_per_s, 1e3 * waited_s / num_drafts if num_drafts else 0.0, done.metrics)


def measure(
    model: Path, drafters: dict[str, str | Path], prompts: list[Prompt], steps: int, repeats: int, max_tokens: int
) -> dict[str, dict[str, list[Run]]]:
    """Measures all drafters; returns runs by workload and kind."""
    chain = SpeculationConfig(steps, 1, steps + 1)
    results: dict[str, dict[str, list[Run]]] = {workload: {} for group in WORKLOADS for workload in group}
    for group in WORKLOADS * repeats:
        engines = {
            name: open_llm(Pair(model, drafter), max_num_seqs=1, speculation=chain)
            for name, drafter in drafters.items()
        }
        for llm in engines.values():  # the first rounds of a process are slow
            generate(llm, [prompts[-1].token_ids], greedy(8, speculation=False))
        for workload, temperature in group.items():
            for name, llm in engines.items():
                results[workload].setdefault(name, []).append(run_once(llm, prompts, max_tokens, temperature))
    return results


def table(workload: str, runs: dict[str, list[Run]]) -> Table:
    """Table with one row per kind of drafter."""
    plain = middle([run.tokens_per_s for run in runs[PLAIN]])
    rows = []
    for name, of_kind in runs.items():
        speed = middle([run.tokens_per_s for run in of_kind])
        row = (name, spread([run.tokens_per_s for run in of_kind], 0), f"{speed / plain:.2f}")
        if name == PLAIN:
            rows.append((*row, "-", "-", "-", "-"))
            continue
        metrics = of_kind[-1].speculation
        rows.append(
            (
                *row,
                f"{metrics.acceptance_length:.2f}",
                str(metrics.num_drafts),
                f"{middle([run.draft_ms for run in of_kind]):.2f}",
                f"{middle([run.accepted_per_draft_ms for run in of_kind]):.2f}",
            )
        )
    columns = ("drafter", "tokens/s", "over plain", "acceptance length", "drafts", "draft ms", "accepted per draft ms")
    note = "Median (range). Acceptance length counts the bonus token, over the rounds that verified a draft."
    return Table(f"Drafters on {workload}", columns, rows, note)


def run(args: argparse.Namespace) -> Report:
    """Measures all kinds of drafters."""
    pair = chosen_pair(args)
    num_prompts, max_tokens, repeats = (2, 24, 1) if args.quick else (args.prompts, args.max_tokens, args.repeats)
    drafters: dict[str, str | Path] = {PLAIN: PLAIN, **chosen_drafters(args, pair)}
    draft_model = args.draft_model or (DEMO_FOLDER / "draft_model" if args.model is None else None)
    draft_model = draft_model if "draft_model" in KINDS else None
    if draft_model is not None:
        drafters["draft_model"] = draft_model
    drafters |= {name: name for name in TEXT_DRAFTERS}
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, num_prompts)
    facts = {**machine_facts(), **model_facts(*pair)}
    if draft_model is not None:
        facts["draft model"] = model_facts(draft_model, PLAIN)["model"]
    facts["workload"] = f"{describe(prompts)}; {max_tokens} tokens each, chains of {args.steps}, {repeats} repeats"
    results = measure(pair.model, drafters, prompts, args.steps, repeats, max_tokens)
    figures: dict[str, Any] = {
        workload: {
            name: {
                "tokens_per_s": [round(run.tokens_per_s, 2) for run in of_kind],
                "draft_ms": [round(run.draft_ms, 4) for run in of_kind],
                "accepted_per_draft_ms": [round(run.accepted_per_draft_ms, 4) for run in of_kind],
                "speculative_decoding": of_kind[-1].speculation.as_dict(),
            }
            for name, of_kind in runs.items()
        }
        for workload, runs in results.items()
    }
    return Report("Drafters", facts, [table(workload, runs) for workload, runs in results.items()], figures)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--draft-model", type=Path, help="folder of a small causal LM; the demo's with the demo pair")
    add_other_drafters(parser)
    parser.add_argument("--steps", type=int, default=5, help="length of the chains")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    quiet()
    report = run(args)
    report.finish(args, "drafters")


if __name__ == "__main__":
    main()
