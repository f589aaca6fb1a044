"""Keeps torch out of processes that only handle text: importing torch takes seconds and much memory."""

import sys


def keep_torch_out() -> None:
    """Makes transformers behave as if torch were not installed; does nothing if torch is imported already.

    Call this function in processes that need only tokenizers and configurations; models and image processors must be
    loaded in other processes. transformers has no setting to leave torch out, but all its modules call
    `is_torch_available` before they import torch.
    """
    if "torch" in sys.modules:
        return
    import transformers.utils
    from transformers.utils import import_utils

    transformers.utils.is_torch_available = import_utils.is_torch_available = _not_available


def _not_available() -> bool:
    return False
