"""A head that learns while it serves text that it was not trained on, compared with the same head without learning.

    .venv/bin/python benchmarks/learning.py [--head KIND] [--domain NAME ...] [--minutes N] [--quick] [--output FILE]

One engine of the demo's verifier, in process, with fixed trees, completes prompts of new domains, four at once: C
headers, HTML of the standard library's documentation, JSON logs, and English of licences and READMEs, all collected or
generated on this machine. Training starts from the demo's head; from a `narrow` one, which is trained here for some
minutes on Python alone; or from a `blank` one. The learner runs between batches of requests, for `core-share` of the
core seconds that serving took, and heads that it promotes are swapped in. Minutes in the report count those core
seconds, so that the curve does not depend on the machine's other load. At every mark the engine completes the same
held-out prompts, which are never learned from, of the new domains and of Python, the old domain; each text must equal
that of the head that does not learn.

`learning_http.py` measures the speed of a server while the learner runs.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from domains import Prompts, prompts_of
from learning_report import Mark, add_learning_options, finish
from narrow_head import OLD, first_head

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.learning.folder import learning_root
from wingbeat.deployments.learning.rounds import record_rounds
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.inner_drafter import attach
from wingbeat.runtime.learning.head_follower import HeadFollower
from wingbeat.runtime.learning.head_versions import learner_figures
from wingbeat.runtime.learning.learner import Learner
from wingbeat.runtime.learning.settings import LearnerSettings
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import load_model

TOKENS, CLIENTS, BATCH = 96, 4, 32


class Asked(NamedTuple):
    """Result of a set of completions."""

    texts: list[list[int]]
    length: float
    """Tokens per round with a draft tree."""


class Pair:
    """Engine with its drafter, for four concurrent requests."""

    def __init__(self, config: AppConfig, temperature: float) -> None:
        folder, speculation = config.model_dir(), SpeculationConfig(adaptive=False)
        loaded = load_model(folder, torch.float32, torch.device("cpu"))
        source = str(config.choice().source)
        self.drafter = load_drafter(source, TargetDescription.from_checkpoint(folder), speculation)
        self.worker = DraftWorker(self.drafter)
        limits = EngineConfig(max_num_seqs=CLIENTS, speculation=speculation, num_kv_blocks=2000)
        self.engine = Engine(loaded, limits, self.drafter.needs)
        attach(self.engine, self.worker, InProcessChannel)
        self._tokenizer, self._temperature = Tokenizer.load(folder), temperature
        self._numbers = itertools.count()

    def complete(self, prompts: list[str], learn: bool) -> Asked:
        """Completes prompts; results are in the prompts' order."""
        before, numbers = self.engine.speculation, {}
        for index, prompt in enumerate(prompts):
            name = str(next(self._numbers))
            numbers[name] = index
            # A held-out prompt keeps its seed at every mark.
            seed = int(name) if learn else index
            params = SamplingParams(
                max_tokens=TOKENS, temperature=self._temperature, seed=seed, ignore_eos=True, learn=learn
            )
            self.engine.add_request(Request(name, tuple(self._tokenizer.encode(prompt)), params))
        texts: list[list[int]] = [[] for _ in prompts]
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                texts[numbers[output.request_id]] += output.token_ids
        after = self.engine.speculation
        rounds = after.num_drafts - before.num_drafts
        return Asked(texts, 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / rounds)


class Bench:
    """The engine, the learner of its head, and the prompts measured at every mark."""

    def __init__(self, config: AppConfig, prompts: dict[str, Prompts], options: argparse.Namespace) -> None:
        self._share, self._new = options.core_share, [prompts[name].served for name in options.domain]
        self._pair = Pair(config, options.temperature)
        self._sets = {domain: found.held[: options.prompts] for domain, found in prompts.items()}
        self._still = {domain: self._pair.complete(texts, learn=False) for domain, texts in self._sets.items()}
        recording = record_rounds(config, self._pair.engine)
        self._pair.engine.observe(recording.rounds)
        self._learner = _learner_of(config, options.core_share)
        self._learner.resume()
        HeadFollower(self._learner.ledger, self._pair.worker).start()
        self._numbers = itertools.count()
        self.serving_s = self.learner_s = 0.0
        self.num_tokens = 0

    def serve_for(self, seconds: float) -> None:
        """Serves, learns and swaps heads until serving has taken `seconds` of a core."""
        until = self.serving_s + seconds
        while self.serving_s < until:
            prompts = [self._prompt(next(self._numbers)) for _ in range(BATCH)]
            self.serving_s += _seconds_of(lambda prompts=prompts: self._pair.complete(prompts, learn=True))
            self.num_tokens += BATCH * TOKENS
            while self.learner_s < self._share * self.serving_s:
                spent = _seconds_of(self._learner.turn)
                self.learner_s += spent
                if self._learner.state.startswith("waiting"):
                    break

    def mark(self) -> Mark:
        """Measures all held-out prompts."""
        now = {domain: self._pair.complete(texts, learn=False) for domain, texts in self._sets.items()}
        for domain, asked in now.items():
            if asked.texts != self._still[domain].texts:
                raise SystemExit(f"the text of {domain} depends on who drafts")
        lengths = {domain: (asked.length, self._still[domain].length) for domain, asked in now.items()}
        version = self._pair.worker.watch.head_version
        return Mark(round(self.serving_s / 60, 1), version, self.num_tokens, self.learner_s, lengths)

    def said(self) -> dict[str, Any]:
        """Final state of the ledger and the learner."""
        ledger = self._learner.ledger.read()
        learner = learner_figures(self._learner.ledger.folder) or {}
        return {"learner": learner, "counts": ledger.counts, "ledger": ledger.model_dump(mode="json")}

    def _prompt(self, number: int) -> str:
        prompts = self._new[number % len(self._new)]
        return prompts[number // len(self._new) % len(prompts)]


def _learner_of(config: AppConfig, core_share: float) -> Learner:
    """Creates a learner as a server does, except that it never waits: the caller decides when it runs."""
    settings = LearnerSettings(
        root=learning_root(config),
        verifier=config.model_dir(),
        verifier_name=config.model_name(),
        configured_head=Path(config.choice().source),
        max_bytes=config.learn.max_bytes,
        expire_s=config.learn.expire_s,
        core_share=core_share,
        margin=config.learn.margin,
    )
    return Learner(settings, load=lambda: 0.0)


def _seconds_of(work: Any) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def run(options: argparse.Namespace, folder: Path) -> tuple[list[Mark], dict[str, Any]]:
    """Runs the benchmark; returns the marks and the final state of the ledger."""
    prompts = {name: prompts_of(name) for name in (*options.domain, OLD)}
    head = first_head(options, folder / "narrow")
    chosen = {} if head is None else {"drafter": str(head)}
    config = AppConfig(learn={"dir": folder / "learning"}, **chosen)
    bench = Bench(config, prompts, options)
    marks = [bench.mark()]
    print(marks[-1].line(), flush=True)
    if not options.minutes:
        finish(options, marks, [], bench.said())
    while marks[-1].minutes < options.minutes:
        bench.serve_for(60 * options.every)
        marks.append(bench.mark())
        print(marks[-1].line(), flush=True)
        # Results are saved at every mark, so that an interrupted run keeps them.
        finish(options, marks, [], bench.said(), quiet=marks[-1].minutes < options.minutes)
    return marks, bench.said()


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_learning_options(parser, "learning", minutes=30.0, every=3.0, prompts=16)
    parser.add_argument("--keep", type=Path, help="folder for rounds, heads and the ledger")
    options = parser.parse_args()
    if options.quick:
        options.minutes, options.every, options.prompts, options.head_steps = 0.6, 0.3, 4, 4
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run(options, options.keep or Path(folder))


if __name__ == "__main__":
    main()
