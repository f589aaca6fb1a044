"""Runtime part: images and audio in prompts; imports the implementation only for models with an encoder."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from wingbeat.runtime.media.media_input import MediaInput

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from wingbeat.runtime.media.trial import MediaTrial
    from wingbeat.runtime.model_trial.reference import TrialText

read_span = MediaInput.of_fields


def open_trial(
    model: "PreTrainedModel", texts: "list[TrialText]", whole: bool, refused: Mapping[str, str]
) -> "MediaTrial | None":
    """Returns the test of a model's media; None for a model without media."""
    if all(getattr(model.config, tower, None) is None for tower in ("vision_config", "audio_config")):
        return None
    from wingbeat.runtime.media.trial import media_trial

    return media_trial(model, texts, whole, refused)
