"""Whether a model that takes images is served with them: an image of noise in a text, held against generate().

Text is served whatever comes of it. Nothing of the vision part is imported for a model without one.
"""

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from wingbeat.runtime.scheduling.images import SERVED, ImageInput
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.trial import Reference, TrialText, reference_logits, try_model
from wingbeat.runtime.verifier_errors import BackendLost

if TYPE_CHECKING:
    from wingbeat.runtime.vision.families import VisionFamily

logger = logging.getLogger(__name__)

_GRIDS = ((2, 3), (4, 2))
"""Rows and columns of the images' tokens, where the family leaves that to the image."""
_BEFORE, _BEFORE_WHOLE = 3, 9
"""Tokens before the first image: it begins within the first chunk of a prompt, or behind the second one where no chunk
may end in it."""


@dataclass(frozen=True)
class ImageTrial:
    """What a model says to images."""

    refusal: str = ""
    """Why its images are not served, where that is known already."""
    family: "VisionFamily | None" = None
    references: tuple[Reference, ...] = ()

    def serve(self, loaded: LoadedModel) -> None:
        """Let a prepared model have images if it says the same to them as before."""
        if self.family is None:
            loaded.images = self.refusal or None
            return
        from wingbeat.runtime.vision.rows import Vision

        loaded.vision, loaded.images = Vision(loaded.model, self.family), SERVED
        try:
            try_model(loaded, list(self.references))
        except (torch.OutOfMemoryError, MemoryError, BackendLost):
            raise
        except Exception as error:
            # As with a text's trial: modeling code raises whatever its assumptions lead to.
            loaded.vision, loaded.images = None, f"images are not served: with one of them {error}"
            logger.warning("%s: %s", loaded.name, loaded.images)
        else:
            loaded.vision.encoder.forget()


def image_trial(model: PreTrainedModel, texts: list[TrialText], whole: bool = True) -> ImageTrial:
    """What transformers says to texts with images in them; before anything of the model is switched.

    Args:
        texts: that it is tried with.
        whole: False where several processes have parts of it.
    """
    if getattr(model.config, "vision_config", None) is None:
        return ImageTrial()
    if not whole:
        return ImageTrial("images are not served where tensor_parallel_size is above 1")
    from wingbeat.runtime.vision.families import ImagesNotServed, family_of

    try:
        family = family_of(model.config)
        shown = [_with_images(model, family, text, count) for text, count in zip(texts, (2, 1), strict=True)]
        references = reference_logits(model, shown, lambda text, ids: _inputs(model, family, text, ids))
    except ImagesNotServed as error:
        return ImageTrial(str(error))
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        # As above.
        return ImageTrial(f"images are not served: transformers' own generate() fails: {type(error).__name__}: {error}")
    finally:
        _forget_last_positions(model)
    return ImageTrial(family=family, references=tuple(references))


def _with_images(model: PreTrainedModel, family: "VisionFamily", text: TrialText, count: int) -> TrialText:
    """A text with `count` images among its tokens."""
    config, prompt, images = model.config, list(text.prompt), []
    at = _BEFORE_WHOLE if family.sees_whole_images else _BEFORE
    for grid in _GRIDS[:count]:
        arrays = family.example(config, *grid)
        length = family.num_tokens(config, arrays)
        at = min(at, len(prompt) - 1)
        prompt[at:at] = [config.image_token_id] * length
        images.append(ImageInput.of(at, length, arrays, family.grid(config, arrays)))
        at += length + 2
    return text._replace(prompt=prompt, images=tuple(images))


def _inputs(model: PreTrainedModel, family: "VisionFamily", text: TrialText, token_ids: Tensor) -> dict[str, Tensor]:
    """What generate() takes of the images beside each row of token ids."""
    parameter = next(model.parameters())
    given = {}
    for name in family.inputs:
        array = np.concatenate([image.arrays[name] for image in text.images] * len(token_ids))
        tensor = torch.from_numpy(array).to(parameter.device)
        given[name] = tensor.to(parameter.dtype) if tensor.is_floating_point() else tensor
    if family.marks is not None:
        given[family.marks] = (token_ids == model.config.image_token_id).long()
    return given


def _forget_last_positions(model: PreTrainedModel) -> None:
    """What transformers keeps of the last sequence in the model itself would move the next one's text."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None
