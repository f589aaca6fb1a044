"""Suffix drafts combined with a head, compared with either alone: requests that quote, as agents' do, and chat.

    .venv/bin/python benchmarks/suffix_beside.py [--smollm2 DIR] [--at-once 1 4] [--temperatures 0 1]

Plain decoding, the head, suffix drafts and both together take turns on each group of requests, with an engine each, in
one process and one thread. All clocks, including the engines', are the process's own processor time, so that other
programs on the machine do not affect the result. A first group is a warm-up and not counted. Exits with 1 if both
together are more than 3 % slower than the better of the two, or write other text.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from local_engine import quiet
from report import Report, Table, machine_facts
from workload import held_out_prompts

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.corpus import split_files
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer

time.perf_counter = time.process_time
ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "deployments" / "bench" / "data" / "spec_bench_held_out.jsonl"
HEAD = ROOT / "examples" / "smollm2_eagle3" / "head"
PLAIN, OWN, TEXT, BOTH = "plain", "head", "suffix", "both"
LEAST = 0.97
"""Required ratio to the better of head and suffix drafts."""
EDITS = (
    "Add the comment `# reviewed` as a first line to this file, and write the whole file again:",
    "Rename the first function of this file to `renamed`, and write the whole file again:",
)
RESULTS = (
    "Quote the output of the tool in full, then say in one sentence what it shows.",
    "Repeat the rows that the tool has found, one by one.",
)


class Load(NamedTuple):
    """Requests of one kind to one model."""

    name: str
    prompts: list[list[int]]
    max_tokens: int


@dataclass
class Mode:
    """A way of decoding, with sums over its groups."""

    llm: LLM
    speculation: bool = True
    tokens: int = 0
    seconds: float = 0.0
    metrics: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    texts: list[list[int]] = field(default_factory=list)

    def answer(self, load: Load, rows: slice, temperature: float) -> None:
        """Answers some of the requests concurrently."""
        prompts = load.prompts[rows]
        params = [
            SamplingParams(load.max_tokens, temperature, seed=rows.start + row, speculation=self.speculation)
            for row in range(len(prompts))
        ]
        began = time.process_time()
        results = self.llm.generate(prompts, params)
        self.seconds += time.process_time() - began
        for result in results:
            self.tokens += len(result.token_ids)
            self.metrics.add(result.metrics)
            self.texts.append(result.token_ids)

    def forget(self) -> None:
        """Resets all counts."""
        self.tokens, self.seconds, self.metrics, self.texts = 0, 0.0, SpeculationMetrics(), []

    @property
    def rate(self) -> float:
        """Tokens per second of processor time."""
        return self.tokens / self.seconds


def opened(model: Path, drafter: str | Path, at_once: int, beside: bool) -> LLM:
    """Opens a model with a drafter."""
    config = EngineConfig(
        max_num_seqs=at_once,
        max_model_len=1536,
        enable_prefix_caching=False,
        speculation=SpeculationConfig.default("cpu"),
        suffix_beside=beside,
    )
    return LLM(model, drafter, config, InProcessChannel, device="cpu", threads=1, dtype="float32")


def pieces(count: int, least: int, most: int) -> list[str]:
    """Functions and classes from held-out files of the standard library, with `least` to `most` lines."""
    found = []
    for path in split_files(stdlib_root(), (".py",)).held_out:
        blocks = path.read_text(encoding="utf-8", errors="replace").split("\n\n\n")
        blocks = [
            block for block in blocks if least <= block.count("\n") <= most and block.startswith(("def ", "class "))
        ]
        found += blocks[:2]
    return found[:: max(len(found) // count, 1)][:count]


def demo_loads(tokenizer: Tokenizer, count: int) -> list[Load]:
    """Requests to the demo model: code to continue.

    The first load repeats a file, as an edit does; the second continues files that were not seen before.
    """
    edits = []
    for piece in pieces(count, 20, 60):
        ids = tokenizer.encode(piece)[:320]
        edits.append(tokenizer.encode("# before\n") + ids + tokenizer.encode("\n\n\n# after\n") + ids[:24])
    fresh = [prompt.token_ids for prompt in held_out_prompts(tokenizer, stdlib_root(), count)]
    return [Load("files written again", edits, 256), Load("new files", fresh, 128)]


def chat_loads(tokenizer: Tokenizer, count: int) -> list[Load]:
    """Requests to the chat model: edits of files, tool results to quote, questions."""

    def asked(text: str) -> list[int]:
        return tokenizer.encode_chat([{"role": "user", "content": text}])

    codes = pieces(count, 12, 40)
    edits = [asked(f"{EDITS[i % 2]}\n```python\n{code[:1400]}\n```") for i, code in enumerate(codes)]
    tables = [
        page for page in sorted((ROOT / "docs").glob("*.md")) if page.read_text(encoding="utf-8").count("\n| ") > 12
    ]
    results = []
    for index in range(count):
        lines = tables[index % len(tables)].read_text(encoding="utf-8").splitlines()
        rows = [line[:160] for line in lines if line.startswith("| ")]
        begin = (index * 7) % max(len(rows) - 8, 1)
        results.append(asked(f"Tool output:\n{chr(10).join(rows[begin : begin + 8])}\n\n{RESULTS[index % 2]}"))
    entries = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    chosen = [entries[index * len(entries) // count]["prompt"] for index in range(count)]
    return [
        Load("edits of files", edits, 256),
        Load("tool results quoted", results, 192),
        Load("chat", [asked(text[:3000]) for text in chosen], 128),
    ]


def measure(model: Path, head: Path, load: Load, at_once: int, temperature: float) -> dict[str, Mode]:
    """Runs all modes over all requests.

    Engines are new for each load, since suffix drafts would copy answers to repeated requests.
    """
    own = opened(model, head, at_once, beside=False)
    modes = {
        PLAIN: Mode(own, speculation=False),
        OWN: Mode(own),
        TEXT: Mode(opened(model, "suffix", at_once, beside=False)),
        BOTH: Mode(opened(model, head, at_once, beside=True)),
    }
    costs = [mode.llm.engine.policy.current.policy.costs for mode in modes.values()]
    # All engines get the smallest measured costs, because disturbances while an engine starts are not the subject here.
    least = [min(seconds) for seconds in zip(*(cost.passes.short_s for cost in costs), strict=True)]
    for cost in costs:
        cost.passes = cost.passes._replace(short_s=tuple(least))
    names = list(modes)
    warm_up = load._replace(prompts=load.prompts[:at_once])
    for mode in modes.values():  # an engine learns what pays in its first rounds
        mode.answer(warm_up, slice(0, at_once), temperature)
        mode.forget()
    for number, first in enumerate(range(at_once, len(load.prompts), at_once)):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            modes[name].answer(load, slice(first, first + at_once), temperature)
    return modes


def row_of(name: str, at_once: int, temperature: float, modes: dict[str, Mode]) -> tuple[str, ...]:
    """Row of the table."""
    plain, own, text, both = (modes[mode].rate for mode in (PLAIN, OWN, TEXT, BOTH))
    equal = sum(one == other for one, other in zip(modes[BOTH].texts, modes[PLAIN].texts, strict=True))
    return (
        name,
        str(at_once),
        f"{temperature:g}",
        f"{plain:.0f}",
        *(f"{rate / plain:.2f}" for rate in (own, text, both)),
        f"{both / max(own, text):.3f}",
        *(f"{modes[mode].metrics.acceptance_length:.2f}" for mode in (OWN, TEXT, BOTH)),
        f"{equal}/{len(modes[BOTH].texts)}",
    )


def main() -> None:
    """Measures, prints and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct; without it, the model is skipped"
    )
    parser.add_argument("--only", choices=["demo pair", "SmolLM2"], help="measure one of the two models only")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--requests", type=int, default=24, help="requests of each kind")
    parser.add_argument("--quick", action="store_true", help="send a few requests and write no file")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    quiet()
    pair, count = demo_pair(), 2 if args.quick else args.requests
    models = [("demo pair", pair.verifier, pair.drafter, demo_loads)]
    if args.smollm2 is not None:
        models.append(("SmolLM2", args.smollm2, HEAD, chat_loads))
    lines, figures, worst = [], [], 1.0
    for name, model, head, loads_of in (one for one in models if args.only in (None, one[0])):
        for load in loads_of(Tokenizer.load(model), count):
            for at_once in args.at_once:
                for temperature in args.temperatures:
                    modes = measure(model, head, load, at_once, temperature)
                    lines.append(row_of(f"{name}, {load.name}", at_once, temperature, modes))
                    print(*lines[-1], flush=True)
                    figures.append(_figures(name, load, at_once, temperature, modes))
                    worst = min(worst, float(lines[-1][7]))
                    all_equal = all(mode.texts == modes[PLAIN].texts for mode in modes.values())
                    worst = worst if all_equal else 0.0
    columns = ("requests", "at once", "T", "plain tok/s", "head x plain", "suffix x plain", "both x plain")
    columns += ("both over the better", "tokens a draft: head", "suffix", "both", "texts equal")
    table = Table("Suffix drafts beside a head", columns, lines, "Tokens by second of one core's processor time.")
    facts = machine_facts() | {
        "model": "demo pair, SmolLM2-135M-Instruct",
        "workload": f"{count} requests of each kind",
    }
    Report("Suffix drafts beside a head", facts, [table], {"rows": figures}).finish(args, "suffix_beside")
    sys.exit(worst < LEAST and not args.quick)


def _figures(name: str, load: Load, at_once: int, temperature: float, modes: dict[str, Mode]) -> dict[str, Any]:
    return {
        "model": name,
        "requests": load.name,
        "at_once": at_once,
        "temperature": temperature,
        "modes": {
            mode: {
                "tokens_per_s": round(one.rate, 1),
                "tokens_a_draft": round(one.metrics.acceptance_length, 3),
                "by_text": one.llm.engine.stats().by_text,
                "decisions": None if one.llm.engine.stats().policy is None else one.llm.engine.stats().policy.decisions,
            }
            for mode, one in modes.items()
        },
    }


if __name__ == "__main__":
    main()
