"""Fingerprint that distinguishes answers of different weights or settings."""

import hashlib
import json
from functools import lru_cache
from importlib.metadata import version


@lru_cache(1024)
def fingerprint(text_identity: str, digest: str, variant: str = "") -> str:
    """Returns OpenAI's `system_fingerprint`: equal fingerprints mean equal weights and settings.

    Files named by the settings enter by name only: overwriting them does not change the fingerprint.

    Args:
        text_identity: `AppConfig.text_identity`.
        digest: digest of the pushed weights; empty for the weights named by the settings.
        variant: digest of the variant, if any.
    """
    made_by = [text_identity, digest, variant, version("wingbeat")]
    return f"fp_{hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]}"
