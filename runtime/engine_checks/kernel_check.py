"""Selects the kernels for a process's GPU: only kernels whose results match their torch references on this device."""

import functools
import logging
from pathlib import Path

import torch

from wingbeat.kernels import choice
from wingbeat.kernels.comparison_inputs import Shape
from wingbeat.kernels.parts import hooks
from wingbeat.runtime.engine_checks.bounded_step import bounded_step
from wingbeat.runtime.verifier.checkpoints.checkpoint_config import ConfigFile

logger = logging.getLogger(__name__)

LIMIT_S = 300.0
"""Time limit in seconds, in which about thirty kernels are compiled at the first start on a machine."""


@functools.cache
def choose_kernels(
    device: torch.device, dtype: torch.dtype, fp8_cache: bool = False, model: Path | None = None
) -> tuple[str, ...]:
    """Replaces kernels that fail to compile, or that give other results than their torch references, by the references.

    Each replacement is logged.

    The function runs once per process, because verifier and drafter in one process use the same kernels.

    Args:
        model: folder of the verifier, for whose attention head sizes kernels are compiled; None uses common sizes.

    Returns:
        A line of text for each kernel that was replaced.

    Raises:
        StepTimeout: the compiler or the device hangs.
    """
    try:
        replace_wrong = hooks("replace_wrong")
    except ImportError as error:
        choice.replace(*choice.KERNELS)
        lines = (f"Triton cannot be imported ({error}): torch references run in the place of all kernels",)
    else:
        shape = Shape(dtype, fp8_cache=fp8_cache)._replace(**_heads(model))
        found = bounded_step(
            "checking the kernels",
            LIMIT_S,
            "start with --kernels torch, which needs no compiler, and report it",
            lambda: [difference for check in replace_wrong for difference in check(device, shape)],
        )
        lines = tuple(f"{difference}; its torch reference runs instead, which is slower" for difference in found)
    for line in lines:
        logger.warning("%s", line)
    return lines


def _heads(model: Path | None) -> dict[str, int]:
    """Returns head counts and head size of a model's attention, as in the config.

    Empty if the config does not define these numbers.
    """
    if model is None:
        return {}
    file = ConfigFile.read(model)
    num_heads, hidden_size = file.size("num_attention_heads"), file.size("hidden_size")
    num_kv_heads = file.size("num_key_value_heads") or num_heads
    if not num_heads or not hidden_size or num_heads % num_kv_heads:
        return {}
    # Some layers of Gemma 4 have larger heads than its other layers.
    head_dim = max(file.size("head_dim") or hidden_size // num_heads, file.size("global_head_dim") or 0)
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
