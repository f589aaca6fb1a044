"""Heads that learning starts from: the demo's, or one trained here for a few minutes on one domain's text alone."""

import argparse
from pathlib import Path

from domains import DOMAINS, is_held

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig

MOST_FILES = 400
OLD = "python"
"""Domain that the demo pair and narrow heads were trained on."""


def add_head_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select the head, and the training steps of a narrow one."""
    parser.add_argument("--head", default="narrow", help="head to start from: demo, narrow, blank, or a folder")
    parser.add_argument("--head-steps", type=int, default=150, help="training steps of a narrow head")


def first_head(options: argparse.Namespace, folder: Path) -> Path | None:
    """Returns the head that the options select; None is the demo's.

    A narrow head is a new head of the demo's verifier with the demo head's shape, trained on Python and on the
    verifier's continuations of it; a blank head only takes one training step with a negligible learning rate.
    """
    if options.head == "demo":
        return None
    if options.head not in ("narrow", "blank"):
        return Path(options.head)
    corpus, output = folder / "corpus", folder / "head"
    corpus.mkdir(parents=True)
    texts = (text for text in DOMAINS[OLD]() if not is_held(text))
    for number, text in zip(range(MOST_FILES), texts, strict=False):
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    trained = {"steps": options.head_steps} if options.head == "narrow" else {"steps": 1, "learning_rate": 1e-9}
    config = TrainDrafterConfig(
        verifier=str(AppConfig().model_dir()),
        corpus=corpus,
        suffixes=(".txt",),
        output=output,
        sequence_length=192,
        draft_vocab_size=3072,
        intermediate_size=480,
        rollout_rows=128,
        greedy_fraction=1.0,
        validation_prompts=0,
        threads=1,
        **trained,
    )
    train_drafter(config)
    return output
