"""A process of text alone: transformers without torch, whose import takes seconds and much memory."""

import sys


def keep_torch_out() -> None:
    """Let transformers go by no torch from now on; does nothing where torch is here already.

    For a process that needs tokenizers and configurations. transformers has no setting for it, though all its modules
    ask `is_torch_available` before they import torch. Models and processors of images must be loaded elsewhere.
    """
    if "torch" in sys.modules:
        return
    import transformers.utils
    from transformers.utils import import_utils

    transformers.utils.is_torch_available = import_utils.is_torch_available = _not_available


def _not_available() -> bool:
    return False
