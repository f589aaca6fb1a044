"""Which calls on a GPU run a compiled kernel, and which the torch reference that stands beside it.

A kernel that does not compile here, or computes other numbers than its reference, is replaced before anything is
captured: see `wingbeat.kernels.comparison`. The choice holds for the process.
"""

from torch import Tensor

from wingbeat.kernels.parts import hooks

KERNELS = (
    "attention",
    "store_kv",
    "move_kv",
    "add_rms_norm",
    "rotate_and_store",
    "silu_mul",
    "fp8_linear",
    "ancestors",
    "path_token_ids",
    "walk_tree",
    "grow_tree",
    "top_candidates",
    "noise",
    "choose_tokens",
    "count_tokens",
    *(name for names in hooks("kernels") for name in names()),
)
"""The names that are chosen by: what is launched for one call, or for calls that share their memory."""

_replaced: set[str] = set()


def compiled(name: str, tensor: Tensor) -> bool:
    """Whether a call on a tensor runs the kernel of that name."""
    return tensor.is_cuda and name not in _replaced


def replace(*names: str) -> None:
    """Run references in the place of these kernels from now on.

    Raises:
        ValueError: there is no such kernel.
    """
    for name in names:
        if name not in KERNELS:
            raise ValueError(f"kernel {name!r} is none of {', '.join(KERNELS)}")
        _replaced.add(name)


def replaced() -> tuple[str, ...]:
    """Kernels whose references run."""
    return tuple(name for name in KERNELS if name in _replaced)
