"""Checks whether processes share a GPU through CUDA's multi-process service (MPS), whose clients must not be killed."""

import os
from pathlib import Path

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Directory of the MPS daemon's pipes if `PIPE_VARIABLE` is not set."""


def under_mps(default: Path = DEFAULT_PIPES) -> bool:
    """Whether a CUDA process here is an MPS client: `PIPE_VARIABLE` is set, or the daemon's pipe exists."""
    named = os.environ.get(PIPE_VARIABLE)
    return bool(named) or (default / "control").exists()
