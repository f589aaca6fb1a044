"""A head that was trained for a few minutes on the text of one domain alone: somebody else's, for whom it is served."""

from pathlib import Path

from domains import DOMAINS, is_held

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig

MOST_FILES = 400


def train_narrow_head(domain: str, steps: int, folder: Path, threads: int = 0) -> Path:
    """Train a head of the demo's verifier anew, on a domain's text and on what the verifier makes of it.

    It has the shape of the demo's head and a tenth of its steps, or as many as are given.
    """
    corpus, output = folder / "corpus", folder / "head"
    corpus.mkdir(parents=True)
    texts = (text for text in DOMAINS[domain]() if not is_held(text))
    for number, text in zip(range(MOST_FILES), texts, strict=False):
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    config = TrainDrafterConfig(
        verifier=str(AppConfig().model_dir()),
        corpus=corpus,
        suffixes=(".txt",),
        output=output,
        steps=steps,
        sequence_length=192,
        draft_vocab_size=3072,
        intermediate_size=480,
        rollout_rows=256,
        greedy_fraction=1.0,
        validation_prompts=0,
        precision="float32",
        threads=threads,
    )
    train_drafter(config)
    return output
