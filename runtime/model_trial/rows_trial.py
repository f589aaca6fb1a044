"""Deterministic-mode test of a verifier: compares rows of token trees with the same tokens as a single prompt."""

import torch

from wingbeat.runtime.model_trial.reference import PARENTS, PATHS, TrialText
from wingbeat.runtime.model_trial.trial import Trial
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE
from wingbeat.runtime.verifier_errors import UnsupportedModelError


@torch.inference_mode()
def try_rows(loaded: LoadedModel, texts: list[TrialText]) -> None:
    """Compares logits of tree leaves bit for bit with the logits of single prompts.

    Several trees are verified in one pass.

    Raises:
        UnsupportedModelError: the bits differ; the message does not contain the model's name.
    """
    for text, rows in zip(texts, Trial(loaded, texts).run(), strict=True):
        nodes = rows[len(rows) - len(PARENTS) :]
        for tokens, path in zip(text.paths().tolist(), PATHS, strict=True):
            alone = Trial(loaded, [text._replace(prompt=tokens)]).behind_prompt()
            if not torch.equal(alone, nodes[path[-1]]):
                raise UnsupportedModelError(
                    f"{ASKED_ALIKE}, but its logits in a token tree are not, "
                    "bit for bit, those of the same tokens alone"
                )
