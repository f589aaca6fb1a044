"""Whether processes share a GPU through CUDA's multi-process service (MPS), which clients must leave in order."""

import os
from pathlib import Path

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Default directory of the MPS daemon's pipes, used if the variable is not set."""


def under_mps(default: Path = DEFAULT_PIPES) -> bool:
    """Whether a CUDA process in this environment is an MPS client, judged by the variable and the daemon's pipe."""
    named = os.environ.get(PIPE_VARIABLE)
    return bool(named) or (default / "control").exists()
