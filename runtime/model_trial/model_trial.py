"""Tests a verifier against transformers when it is loaded, and refuses a model with incorrect results."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel

from wingbeat.runtime.model_trial.exact import HALVES, exact_copy
from wingbeat.runtime.model_trial.reference import (
    PARENTS,
    PATHS,
    WRITTEN,
    TrialText,
    reference_logits,
    texts_for,
    written_texts,
)
from wingbeat.runtime.model_trial.trial import Trial, try_model
from wingbeat.runtime.parts import first_result
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.architecture_checks import check_cache
from wingbeat.runtime.verifier.layers.division import Division
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.layers.probe import ProbedAttention
from wingbeat.runtime.verifier.layers.rows_alike import ASKED_ALIKE
from wingbeat.runtime.verifier.loading.loader import switch_model
from wingbeat.runtime.verifier_errors import BackendLost, UnsupportedModelError

logger = logging.getLogger(__name__)


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


class ModelTrial:
    """Reference logits of a model, computed before the model's layers are switched.

    For a model rounded to eight bits, the references are computed on the rounded weights. A half-precision model is
    first tested on a float32 copy, because rounding could hide mistakes.

    Args:
        model: the model as transformers built it.
        probed: the model's attention.
        division: group of processes among which the model is divided; None for a whole model.
        deterministic: whether the model will be switched for deterministic mode.
        folder: the model's checkpoint, whose tokenizer encodes a natural text on which a half-precision model is also
            tested; None tests random tokens alone.

    Raises:
        UnsupportedModelError: the float32 copy fails; the message does not contain the model's name.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        probed: ProbedAttention,
        division: Division | None,
        deterministic: bool,
        folder: Path | None,
    ) -> None:
        if folder is not None and division is None:
            logger.info("testing %s against transformers' own decoding", type(model).__name__)
        self._probed, self._division, self._deterministic = probed, division, deterministic
        self._texts = texts_for(model, probed)
        refused = self._try_in_float32(model) if model.dtype in HALVES else {}
        self._references = reference_logits(model, self._texts)
        if self._references[0].rounding and (written := _written_tokens(folder)):
            self._references += reference_logits(model, written_texts(self._texts, written))
        self._spans = first_result("open_trial", model, self._texts, division is None, refused)

    def check(self, loaded: LoadedModel) -> None:
        """Compares the switched model with the references; the hook `open_trial` serves kinds of media that pass.

        Raises:
            UnsupportedModelError: the logits differ; the message does not contain the model's name.
        """
        try_model(loaded, self._references)
        if self._deterministic:
            try_rows(loaded, self._texts)
        if self._spans is not None:
            self._spans.serve(loaded)

    def _try_in_float32(self, model: PreTrainedModel) -> dict[str, str]:
        """Tests the serving code of a half-precision model on a float32 copy.

        Layers are tested both as transformers wrote them and with speed-ups, because the choice of speed-ups may depend
        on the dtype.

        Returns:
            Reasons why kinds of spans (image, audio) are not served, by kind.

        Raises:
            UnsupportedModelError: as `try_model`.
        """
        probed, whole = self._probed, self._division is None
        copy, count = exact_copy(model, probed.layers)
        is_part = count < len(probed.layers)
        probed = probed._replace(layers=probed.layers[:count])
        try:
            remembered = check_cache(copy).remembered  # the copy's recurrent states are float32 too
            references = reference_logits(copy, self._texts)
            spans = first_result("open_trial", copy, self._texts, whole, {})
        except Exception as error:
            if not is_part or isinstance(error, torch.OutOfMemoryError | MemoryError | BackendLost):
                raise
            logger.info(
                "the first %d layers do not run as a separate float32 model (%s): testing only the whole model",
                count,
                error,
            )
            return {}
        given = copy, "", probed, remembered, self._division, self._deterministic
        with _unlogged():
            if remembered is None:
                try_model(switch_model(*given, fast=False), references)
            loaded = switch_model(*given)
        try_model(loaded, references)
        refused = {} if spans is None else spans.serve(loaded)
        del copy, given, loaded, references, spans
        gc.collect()  # the copy's layers are in reference cycles with the objects that run them
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        return refused


@contextmanager
def _unlogged() -> Iterator[None]:
    """Context manager that silences logs about the copy's layers, because the model itself logs the same lines."""
    runtime = logging.getLogger("wingbeat.runtime")
    before = runtime.level
    runtime.setLevel(logging.ERROR)
    try:
        yield
    finally:
        runtime.setLevel(before)


def _written_tokens(folder: Path | None) -> list[int]:
    """Returns token ids of a natural text; empty if the folder has no readable tokenizer."""
    try:
        tokenizer = None if folder is None else Tokenizer.find(folder)
    except ValueError:
        tokenizer = None
    return [] if tokenizer is None else tokenizer.encode(WRITTEN)
