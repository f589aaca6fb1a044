"""Fingerprint that tells answers of other weights or settings apart."""

import hashlib
import json
from functools import lru_cache
from importlib.metadata import version


@lru_cache(1024)
def fingerprint(text_identity: str, digest: str, variant: str = "") -> str:
    """OpenAI's `system_fingerprint`: two answers that have the same are of the same weights and settings.

    What the settings name is known by its name: files that are written over there change no fingerprint.

    Args:
        text_identity: of the settings, `AppConfig.text_identity`.
        digest: of the weights that were pushed; empty for those of the settings.
        variant: digest of the variant, if any.
    """
    made_by = [text_identity, digest, variant, version("wingbeat")]
    return f"fp_{hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]}"
