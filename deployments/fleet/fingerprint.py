"""Fingerprint of the weights and settings with which an answer was generated."""

import hashlib
import json
from functools import lru_cache
from importlib.metadata import version


@lru_cache(1024)
def fingerprint(text_identity: str, digest: str, variant: str = "") -> str:
    """Returns OpenAI's `system_fingerprint`: equal fingerprints mean equal weights and settings.

    If the settings name a file, the fingerprint depends on the file's name but not on its content, so overwriting the
    file does not change the fingerprint.

    Args:
        text_identity: `AppConfig.text_identity`.
        digest: digest of the pushed weights in use; empty if the weights are those that the settings name.
        variant: digest of the variant; empty for the base model.
    """
    made_by = [text_identity, digest, variant, version("wingbeat")]
    return f"fp_{hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]}"
