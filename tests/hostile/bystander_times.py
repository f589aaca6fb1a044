"""Effect of hostile grammars on the rounds of other requests: with and without them, side by side.

    .venv/bin/python -m tests.hostile.bystander_times [--seconds 10] [--output FILE] [--quick]

Requests without a grammar follow each other in an engine of this process. Beside them come, in turn, requests with
ordinary grammars and with each of the bombs of tests/hostile, which here are not tried out first, but for those that
compile without an end; then the bombs as a server takes them, tried out in a process of their own. A request more costs
a round time whatever its grammar is: ratios are to rounds beside requests with an ordinary grammar. The others' tokens
must be those that they get alone.
"""

import argparse
import gc
import json
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count, cycle

from benchmarks.local_engine import add_model_options, chosen_pair, greedy, open_llm, quiet
from tests.hostile.grammar_bombs import BOMBS, ENDLESS, spec_of
from wingbeat.runtime.grammar.compiler import lark_of_spec
from wingbeat.runtime.grammar.trial import GrammarTrial
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import GrammarSpec, Request

NUM_OTHERS, TOKENS = 4, 48
ORDINARY = {
    "json": spec_of("json", '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    "regex": spec_of("regex", "[a-z ]{20,200}"),
}


class Beside:
    """Requests without a grammar, and beside them some with one."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._numbers = llm, count()
        self._written: dict[str, list[int]] = {}
        self._larks: dict[GrammarSpec, str] = {}
        self._prompt_of: dict[str, tuple[int, ...]] = {}
        self.alone: dict[tuple[int, ...], list[int]] = {}
        """First answer to each prompt without a grammar."""
        self.compared = self.differing = 0
        self._prompts = cycle([llm.tokenizer.encode(text) for text in ("import os\n", "class Stack:\n", "def f(")])
        self._params = greedy(TOKENS)

    def run(
        self, spec: GrammarSpec | None, seconds: float, trial: GrammarTrial | None = None
    ) -> tuple[list[float], int]:
        """Seconds of each round in which another request was, and how many requests with the grammar were refused."""
        engine, rounds, refused = self._llm.engine, [], 0
        if spec is not None and trial is None:
            self._lark_of(spec)
        pool, pending = ThreadPoolExecutor(1), None
        others: set[str] = set()
        bombs: set[str] = set()
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(rounds) < 2:  # of which percentiles are made
            while len(others) < NUM_OTHERS:
                others.add(self._add("other", self._params, None))
            if spec is not None and len(bombs) < 2 and pending is None:
                pending = pool.submit(self._compiled, spec, trial)
            if pending is not None and pending.done():
                refused += self._take(pending, spec, bombs)
                pending = None
            begun = time.perf_counter()
            outputs = engine.step()
            rounds.append(time.perf_counter() - begun)
            for output in outputs:
                refused += output.failure is not None
                if output.request_id in self._written:
                    self._written[output.request_id] += output.token_ids
                if output.finish_reason is not None:
                    self._compare(output.request_id)
                    others.discard(output.request_id)
                    bombs.discard(output.request_id)
        for request_id in (*others, *bombs):
            engine.abort_request(request_id)
        pool.shutdown()
        return rounds, refused

    def _compiled(self, spec: GrammarSpec, trial: GrammarTrial | None) -> object:
        lark = self._lark_of(spec) if trial is None else trial.check(spec)
        return self._llm.grammars.compile(spec, lark)

    def _lark_of(self, spec: GrammarSpec) -> str | None:
        """As another process makes it, which here none does; None of what is refused."""
        if spec not in self._larks:
            with suppress(ValueError):
                self._larks[spec] = lark_of_spec(self._llm.grammars.vocabulary(), spec)
        return self._larks.get(spec)

    def _take(self, pending: "Future[object]", spec: GrammarSpec, bombs: set[str]) -> bool:
        if pending.exception() is not None:
            return True
        params = replace(self._params, temperature=1.0, max_tokens=400, grammar=spec)
        bombs.add(self._add("bomb", params, pending.result()))
        return False

    def _add(self, kind: str, params: object, grammar: object) -> str:
        request_id, prompt = f"{kind} {next(self._numbers)}", tuple(next(self._prompts))
        if grammar is None:
            self._written[request_id], self._prompt_of[request_id] = [], prompt
        self._llm.engine.add_request(Request(request_id, prompt, params), grammar)
        return request_id

    def _compare(self, request_id: str) -> None:
        if request_id in self._written:
            tokens = self._written.pop(request_id)
            self.compared += 1
            self.differing += tokens != self.alone.setdefault(self._prompt_of.pop(request_id), tokens)


def main() -> None:
    """Measure, and print one line for each grammar."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_options(parser)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each grammar")
    args = parser.parse_args()
    quiet()
    seconds = 0.5 if args.quick else args.seconds
    llm = open_llm(chosen_pair(args), max_num_seqs=NUM_OTHERS + 2)
    beside, trial, rows = Beside(llm), GrammarTrial(llm.grammars), []
    trial.warm()
    # As an engine's process does: no collection looks at what was loaded.
    gc.collect()
    gc.freeze()
    beside.run(None, seconds)
    untried = {**ORDINARY, **{name: spec for name, spec in BOMBS.items() if name not in ENDLESS}}
    cases = [("none", None, None), *((name, spec, None) for name, spec in untried.items())]
    cases += [(f"{name}, tried out first", spec, trial) for name, spec in BOMBS.items()]
    ordinary_s = None
    print(
        "beside | rounds | median ms | p99 ms | by that beside JSON | longest ms | refused\n---|---|---|---|---|---|---"
    )
    for name, spec, tried in cases:
        rounds, refused = beside.run(spec, seconds, tried)
        p99_s = statistics.quantiles(rounds, n=100)[98]
        ordinary_s = p99_s if name == "json" else ordinary_s
        ratio = None if ordinary_s is None else p99_s / ordinary_s
        rows.append({"beside": name, "p99_s": p99_s, "ratio": ratio, "longest_s": max(rounds), "refused": refused})
        print(
            f"{name} | {len(rounds)} | {1e3 * statistics.median(rounds):.1f} | {1e3 * p99_s:.1f}"
            f" | {'' if ratio is None else f'{ratio:.2f}'} | {1e3 * max(rounds):.1f} | {refused}",
            flush=True,
        )
    trial.close()
    print(f"\nothers that were answered other tokens than alone: {beside.differing} of {beside.compared}")
    if args.output:
        report = {"seconds": seconds, "rows": rows, "compared": beside.compared, "differing": beside.differing}
        args.output.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
