"""Where a round on a host goes: the verifier's forward pass, the draft, and all the rest, with one request at a time.

Drafter and verifier share a thread, whose processor time is what is counted: other work on the machine takes none of
it, though it makes caches cold. With `--other`, another checkout takes turns with this one, each turn in a process of
its own.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from local_engine import Pair, open_llm, quiet
from report import RESULTS, Report, Table, machine_facts, middle, spread

from wingbeat.kernels.cpu.ops import CpuKernels
from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.scheduling.request import Request, SamplingParams

PARTS = ("model", "draft", "rest")
KINDS = ("plain", "chain of 7")
PROMPT = "def first(values):\n    return values[{number}]\n\n\nclass Reader:\n"
MAX_TOKENS = 96
CHAIN = SpeculationConfig.default("cpu")


class Meter:
    """Counts the thread's seconds within functions that are put in the place of others."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Any) -> Any:
        """The same function, counted."""

        def counted(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args)
            finally:
                self.seconds += time.thread_time() - began

        return counted


def measure(num_requests: int) -> dict[str, dict[str, float]]:
    """Microseconds of a round by kind and part: medians over rounds. Kinds take turns, request by request."""
    demo = demo_pair()
    llm, model, draft = open_llm(Pair(demo.verifier, demo.drafter), max_num_seqs=1, speculation=CHAIN), Meter(), Meter()
    engine = llm.engine
    engine.runner.eager.model = model.around(engine.runner.eager.model)
    CpuKernels.answer = draft.around(CpuKernels.answer)
    rounds: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in KINDS}
    for number in range(2 * num_requests + 2):
        kind = KINDS[number % 2]
        drafts = kind != "plain"
        limits = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
        params = SamplingParams(**limits, speculation=drafts, force_drafts=drafts)
        prompt = tuple(llm.tokenizer.encode(PROMPT.format(number=number)))
        engine.add_request(Request(str(number), prompt, params))
        for step in range(MAX_TOKENS):
            before, began = (model.seconds, draft.seconds), time.thread_time()
            outputs = engine.step()
            took = time.thread_time() - began
            own, drafted = model.seconds - before[0], draft.seconds - before[1]
            if not engine.has_unfinished_requests():
                break
            if step > 1 and outputs and number > 1:
                rounds[kind].append((own, drafted, took - own - drafted))
    found = {}
    for kind, times in rounds.items():
        medians = (1e6 * middle(list(part)) for part in zip(*times, strict=True))
        found[kind] = dict(zip(PARTS, medians, strict=True))
    return found


def turn(checkout: Path, num_requests: int) -> dict[str, dict[str, float]]:
    """One turn of a checkout, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    command = [sys.executable, str(Path(__file__).resolve()), "--one-turn", str(num_requests)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def run(checkouts: dict[str, Path], repeats: int, num_requests: int, output: Path | None) -> None:
    """Measure in turns, print, and write the figures."""
    turns: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in checkouts}
    for _ in range(repeats):
        for name, checkout in checkouts.items():
            turns[name].append(turn(checkout, num_requests))
    rows = []
    for name, measured in turns.items():
        for kind in KINDS:
            each = [one[kind] for one in measured]
            shares = [one["rest"] / sum(one.values()) for one in each]
            cells = (f"{middle([one[part] for one in each]):.0f}" for part in PARTS)
            rows.append((f"{name}, {kind}", *cells, spread([100 * share for share in shares], 1)))
    facts = machine_facts() | {
        "model": "the demo pair, one thread, drafter in the same process",
        "workload": f"one request at a time, greedy, {MAX_TOKENS} tokens; {repeats} turns of {num_requests}",
    }
    columns = ("us of processor time a round", "verifier's pass", "draft", "rest", "rest, % of the round")
    table = Table("Where a round on a host goes", columns, rows, "Medians over rounds, then over turns (range).")
    report = Report("Where a round on a host goes", facts, [table], {"turns": turns})
    report.show()
    if output is not None:
        report.save(output)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="of each kind, in a turn")
    parser.add_argument("--other", type=Path, help="another checkout, which takes turns with this one")
    parser.add_argument("--quick", action="store_true", help="few requests: shows that it runs, measures nothing")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    parser.add_argument("--one-turn", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    quiet()
    if args.one_turn is not None:
        print(json.dumps(measure(args.one_turn)))
        return
    checkouts = {"this checkout": Path(__file__).resolve().parents[1]}
    checkouts |= {} if args.other is None else {"the other one": args.other.resolve()}
    output = args.output or (None if args.quick else RESULTS / "host_round.json")
    run(checkouts, 1 if args.quick else args.repeats, 2 if args.quick else args.requests, output)


if __name__ == "__main__":
    main()
