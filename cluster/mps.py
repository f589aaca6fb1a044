"""Whether processes share a GPU through CUDA's multi-process service, which no client should leave without a word."""

import os
from pathlib import Path

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_PIPES = Path("/tmp/nvidia-mps")
"""Where its daemon listens unless that variable says otherwise."""


def under_mps(default: Path = DEFAULT_PIPES) -> bool:
    """Whether a CUDA process of this environment is a client of that service, as far as its daemon's pipe tells."""
    named = os.environ.get(PIPE_VARIABLE)
    return bool(named) or (default / "control").exists()
