"""Tests in another process whether the GPU driver responds.

A call that hangs in the driver holds Python's interpreter lock, and so prevents every timeout of its own process.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from wingbeat.runtime.checks.bounded_step import StepTimeout

ANSWERED_S = 180.0
"""Seconds for importing torch from a cold disk, and creating a context on each of eight GPUs without a loaded
driver."""
_KILLED_S = 2.0
_QUESTION = """
import torch
print(int(torch.cuda.is_available()), flush=True)
for index in range(torch.cuda.device_count()):
    torch.ones(1, device=f"cuda:{index}").item()
"""


def sees_gpu(question: Sequence[str] = (sys.executable, "-P", "-c", _QUESTION), most_s: float = ANSWERED_S) -> bool:
    """Whether torch sees a GPU, after a context was created on each; errors of single GPUs are reported elsewhere.

    Args:
        question: a command that prints 1 or 0.

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
