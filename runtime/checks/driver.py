"""Whether the GPUs' driver answers, asked by another process.

A call that hangs in the driver keeps Python's lock, and with it every limit of time of its own process.
"""

import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from wingbeat.runtime.checks.bounded_step import StepTimeout

ANSWERED_S = 180.0
"""An import of torch from a cold disk, and a context on each of eight GPUs whose driver was not loaded."""
_KILLED_S = 2.0
_QUESTION = """
import torch
print(int(torch.cuda.is_available()), flush=True)
for index in range(torch.cuda.device_count()):
    torch.ones(1, device=f"cuda:{index}").item()
"""


def sees_gpu(question: Sequence[str] = (sys.executable, "-P", "-c", _QUESTION), most_s: float = ANSWERED_S) -> bool:
    """Whether torch sees a GPU, once each has had a context; what goes wrong in one is for the parts to tell.

    Args:
        question: a command that prints 1 or 0.

    Raises:
        StepTimeout: the driver does not answer.
    """
    import torch

    if torch.version.cuda is None:
        return torch.cuda.is_available()
    process = subprocess.Popen(question, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        return process.communicate(timeout=most_s)[0].startswith("1")
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # what hangs in the driver does not end even so
            process.wait(_KILLED_S)
        raise StepTimeout(
            f"the driver does not answer within {most_s:.0f} s, and neither model nor GPU is tried: see whether "
            "nvidia-smi answers, and what dmesg says of NVRM; mostly a reboot helps"
        ) from None
