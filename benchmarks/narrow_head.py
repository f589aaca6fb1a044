"""A head that was trained for a few minutes on the text of one domain alone: somebody else's, for whom it is served."""

from pathlib import Path

from domains import DOMAINS, is_held

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.training.drafter import train_drafter
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig

MOST_FILES = 400


def narrow_head(kind: str, domain: str, steps: int, folder: Path) -> Path | None:
    """The folder of a new head of the demo's verifier and of the demo head's shape; None where `kind` is the demo's.

    A narrow one is trained on a domain's text and on what the verifier makes of it; a blank one only takes one step of
    next to no size.
    """
    if kind == "demo":
        return None
    corpus, output = folder / "corpus", folder / "head"
    corpus.mkdir(parents=True)
    texts = (text for text in DOMAINS[domain]() if not is_held(text))
    for number, text in zip(range(MOST_FILES), texts, strict=False):
        (corpus / f"{number}.txt").write_text(text, encoding="utf-8")
    trained = {"steps": steps} if kind == "narrow" else {"steps": 1, "learning_rate": 1e-9}
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
