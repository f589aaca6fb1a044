"""Draft head of a verifier whose weights move: tokens per round before, after, and after minutes of learning.

    .venv/bin/python benchmarks/moved_verifier.py [--learning-rate RATE ...] [--minutes N] [--output FILE]

For each learning rate a server of the demo pair starts with `--rollouts` and a learner. The verifier takes 20 steps of
SGD on English texts and sends its weights to the server, which continues with the head for the old weights. Clients
then request completions for some minutes. The texts of every mark must equal those without drafts.
"""

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from domains import prompts_of
from learning_http import Traffic, ask, drafter_of
from process_pause import stopped
from report import Report, Table, machine_facts
from servers import App, wingbeat_apps
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.rollouts.trainer import WeightSender
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.tokenizer import Tokenizer

STEPS, ROWS, LENGTH = 20, 8, 128


class Moved(NamedTuple):
    """Result of one distance."""

    learning_rate: float
    distance: float
    """Mean KL divergence of the new weights' next token from the old weights', nats per token."""
    lengths: tuple[float, float, float]
    """Tokens per round before the update, after it, and after the minutes of learning."""
    version: int
    """Version of the head that drafts at the end; 0 is the head that the server started with."""


def batches(texts: list[str], tokenizer: Tokenizer) -> Iterator[Tensor]:
    """Yields int64 [ROWS, LENGTH] of consecutive tokens, without end."""
    ids = list(itertools.chain.from_iterable(map(tokenizer.encode, texts[:400])))
    rows = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    yield from itertools.cycle(rows[: len(rows) // ROWS * ROWS].split(ROWS))


def move(policy: PreTrainedModel, texts: Iterator[Tensor], learning_rate: float) -> None:
    """Takes the steps of SGD on the likelihood of the texts."""
    optimizer = torch.optim.SGD(policy.parameters(), lr=learning_rate)
    for ids in itertools.islice(texts, STEPS):
        optimizer.zero_grad()
        policy(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()


@torch.inference_mode()
def distance(old: PreTrainedModel, new: PreTrainedModel, ids: Tensor) -> float:
    """Mean KL divergence of the next-token distributions, new from old, nats per token."""
    before, after = (model(ids).logits.log_softmax(-1) for model in (old, new))
    return (after.exp() * (after - before)).sum(-1).mean().item()


def length_of(app: App, prompts: list[str], fields: dict[str, Any]) -> float:
    """Tokens per round on held-out prompts, with the learner stopped meanwhile.

    Raises:
        SystemExit: a text differs from that without drafts.
    """
    with stopped(app.stats().get("learner_pid", 0)):
        drafted = ask(app, prompts, **fields)
        plain = ask(app, prompts, **fields | {"speculation": {"enabled": False, "learn": False}})
    if drafted.texts != plain.texts:
        raise SystemExit("a text depends on the drafts")
    return drafted.length


def run(options: argparse.Namespace, learning_rate: float, folder: Path) -> Moved:
    """Measures one distance."""
    verifier = demo_pair().verifier
    tokenizer, prompts = Tokenizer.load(verifier), prompts_of("python")
    old, policy = (AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32) for _ in range(2))
    move(policy, batches(prompts_of("english").served, tokenizer), learning_rate)
    far = distance(old, policy, next(batches(prompts.held, tokenizer)))
    held, fields = prompts.held[: options.prompts], {"temperature": options.temperature, "seed": 1}
    learn = {"dir": folder / "learning", "core_share": options.core_share, "max_load": 1000.0}
    config = AppConfig(learn=learn, adaptive=False, rollouts=True, weight_transfer_config={"backend": "gloo"})
    with wingbeat_apps({"moved": config}) as apps:
        app = apps["moved"]
        before = length_of(app, held, fields)
        WeightSender(app.url).send(policy.named_parameters(), version="moved")
        after = length_of(app, held, fields)
        traffic = Traffic(app, [prompts.served], {"temperature": options.temperature})
        try:
            traffic.go_for(60 * options.minutes)
        finally:
            traffic.end()
        found = Moved(learning_rate, far, (before, after, length_of(app, held, fields)), app.stats()["head_version"])
        print(found, drafter_of(app)["learner"], flush=True)
        return found


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learning-rate", type=float, nargs="+", default=[0.02, 0.1, 0.5], help="of the SGD steps")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes of requests and learning")
    parser.add_argument("--prompts", type=int, default=24, help="held-out prompts of a mark")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--core-share", type=float, default=0.5, help="share of a core for the learner")
    parser.add_argument("--quick", action="store_true", help="one rate, seconds of learning: checks that it works")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    options = parser.parse_args()
    if options.quick:
        options.learning_rate, options.minutes, options.prompts = options.learning_rate[:1], 0.2, 4
    found = []
    for learning_rate in options.learning_rate:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(options, learning_rate, Path(folder)))
    rows = [
        (
            f"{one.learning_rate:g}",
            f"{one.distance:.3f}",
            *(f"{length:.2f}" for length in one.lengths),
            str(one.version),
        )
        for one in found
    ]
    columns = ("rate of SGD", "KL, nats a token", "before", "after", f"after {options.minutes:g} min", "head's version")
    table = Table("Tokens per round of a moved verifier", columns, rows)
    facts = machine_facts() | {"temperature": f"{options.temperature:g}", "core share": f"{options.core_share:g}"}
    Report("moved_verifier", facts, [table], {"rows": [one._asdict() for one in found]}).finish(
        options, "moved_verifier"
    )


if __name__ == "__main__":
    main()
