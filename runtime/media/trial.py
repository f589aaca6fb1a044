"""Tests whether a model computes correct logits with media.

The logits for texts with media of random noise are compared with those of transformers' generate(). If the test fails,
the model is still served for text.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.runtime.media.encoder import ModelEncoder
from wingbeat.runtime.media.families import family_of, kinds_of
from wingbeat.runtime.media.family import MediaFamily, MediaNotServed
from wingbeat.runtime.media.media_input import ARE, SERVED
from wingbeat.runtime.media.rows import MediaPart
from wingbeat.runtime.model_trial.reference import Reference, TrialText, reference_logits
from wingbeat.runtime.model_trial.trial import try_model
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier_errors import BackendLost, UnsupportedModelError

logger = logging.getLogger(__name__)

_GRIDS = ((2, 3), (4, 2))
"""Numbers of rows and columns of the test images' tokens.

For audio the product is the number of tokens, if the family allows any number.
"""
_BEFORE, _BEFORE_WHOLE = 3, 9
"""Numbers of tokens before the first image, for families whose prompt chunks may end inside an image, and for families
whose chunks may not.

With the first number, the image begins within the first prompt chunk; with the second, after the second chunk.
"""


@dataclass(frozen=True)
class MediaTrial:
    """Reference logits for the kinds of media for which a model has an encoder."""

    refusals: dict[str, str] = field(default_factory=dict)
    """Maps a kind of media to the reason why the kind cannot be served, for kinds that are refused before the test."""
    family: MediaFamily | None = None
    references: tuple[Reference, ...] = ()

    def serve(self, loaded: LoadedModel) -> dict[str, str]:
        """Enables each kind of media with which a prepared model's logits match the references.

        Returns:
            For each kind of media that is not served, the reason.
        """
        loaded.takes |= self.refusals
        if self.family is None:
            return self.refusals
        kind = self.family.kind
        part = MediaPart(loaded.model.config, ModelEncoder(loaded.model, self.family), loaded)
        loaded.add(part)
        loaded.takes[kind] = SERVED
        try:
            try_model(loaded, list(self.references))
        except (torch.OutOfMemoryError, MemoryError, BackendLost):
            raise
        except Exception as error:
            # As in the text test, modeling code can raise any exception.
            del loaded.parts[part.name]
            loaded.takes[kind] = f"{ARE[kind]} not served: in a text {error}"
            unexpected = None if isinstance(error, UnsupportedModelError) else error
            logger.warning("%s: %s", loaded.name, loaded.takes[kind], exc_info=unexpected)
            return self.refusals | {kind: loaded.takes[kind]}
        part.encoder.forget()
        return self.refusals


def media_trial(model: PreTrainedModel, texts: list[TrialText], whole: bool, refused: Mapping[str, str]) -> MediaTrial:
    """Computes transformers' reference logits for texts with media, before the model is modified.

    Args:
        texts: the test texts.
        whole: whether this process has the whole model; False if the model is divided among processes.
        refused: kinds of media that are already known not to be served, with the reason.
    """
    refusals, trial = dict(refused), MediaTrial()
    for kind in kinds_of(model.config):
        if kind in refusals:
            continue
        try:
            if not whole:
                raise MediaNotServed(f"{ARE[kind]} not served where tensor_parallel_size is above 1")
            trial = _tried(model, family_of(model.config, kind), texts)
        except MediaNotServed as error:
            refusals[kind] = str(error)
    return MediaTrial(refusals, trial.family, trial.references)


def _tried(model: PreTrainedModel, family: MediaFamily, texts: list[TrialText]) -> MediaTrial:
    try:
        shown = [_with_media(model, family, text, count) for text, count in zip(texts, (2, 1), strict=True)]
        references = reference_logits(model, shown, lambda text, ids: _inputs(model, family, text, ids))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        # As in the text test, modeling code can raise any exception.
        failed = f"transformers' own generate() fails: {type(error).__name__}: {error}"
        raise MediaNotServed(f"{ARE[family.kind]} not served: {failed}") from error
    finally:
        _forget_last_positions(model)
    return MediaTrial(family=family, references=tuple(references))


def _with_media(model: PreTrainedModel, family: MediaFamily, text: TrialText, count: int) -> TrialText:
    """Inserts `count` images or sounds into a text."""
    config, prompt, media = model.config, list(text.prompt), []
    at = _BEFORE_WHOLE if family.sees_whole_images else _BEFORE
    for grid in _GRIDS[:count]:
        one = family.medium(config, min(at, len(prompt) - 1), family.example(config, *grid))
        prompt[one.start : one.start] = [family.token_id(config)] * one.length
        media.append(one)
        at = one.end + 2
    return text._replace(prompt=prompt, spans=tuple(media))


def _inputs(model: PreTrainedModel, family: MediaFamily, text: TrialText, token_ids: Tensor) -> dict[str, Tensor]:
    """Returns the media arguments of generate() for rows of token ids."""
    parameter = next(model.parameters())
    given = {}
    for name in family.inputs:
        array = np.concatenate([one.arrays[name] for one in text.spans] * len(token_ids))
        tensor = torch.from_numpy(array).to(parameter.device)
        given[name] = tensor.to(parameter.dtype) if tensor.is_floating_point() else tensor
    if family.marks is not None:
        given[family.marks] = (token_ids == family.token_id(model.config)).long()
    return given


def _forget_last_positions(model: PreTrainedModel) -> None:
    """Removes state that transformers stores in the model and that would shift the positions of the next sequence."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None
