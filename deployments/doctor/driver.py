"""Tests in another process whether the GPU driver responds.

The test needs another process, because a call that hangs in the driver holds Python's interpreter lock, so that no
timeout within the same process could fire.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from wingbeat.runtime.engine_checks.bounded_step import StepTimeout

ANSWERED_S = 180.0
"""Seconds allowed for importing torch from a cold disk, and for creating a context on each of eight GPUs while the
driver is not loaded."""
_KILLED_S = 2.0
_QUESTION = """
import torch
print(int(torch.cuda.is_available()), flush=True)
for index in range(torch.cuda.device_count()):
    torch.ones(1, device=f"cuda:{index}").item()
"""


def sees_gpu(question: Sequence[str] = (sys.executable, "-P", "-c", _QUESTION), most_s: float = ANSWERED_S) -> bool:
    """Returns whether torch sees a GPU, after creating a context on each GPU.

    Errors of single GPUs are reported elsewhere.

    Args:
        question: command that prints 1 if torch sees a GPU, else 0.

    Raises:
        StepTimeout: the driver does not respond.
    """
    import torch

    if torch.version.cuda is None:
        return torch.cuda.is_available()
    process = subprocess.Popen(question, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        return process.communicate(timeout=most_s)[0].startswith("1")
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver survives SIGKILL
            process.wait(_KILLED_S)
        raise StepTimeout(
            f"the driver does not answer within {most_s:.0f} s, so the start is aborted: check whether "
            "nvidia-smi answers, and search dmesg for NVRM; a reboot usually helps"
        ) from None
