"""Chooses the target's tokens on the host in C++ (`choice.h`); the tokens equal those of torch's operations."""

from ctypes import CDLL, POINTER, Structure, byref, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.kernels.sampling.processors import LogitProcessors, apply_processors
from wingbeat.kernels.sampling.reference import choose_tokens


class Sampling(Structure):
    """Logits, sampling parameters and output buffers of a batch of rows."""

    _fields_ = [
        ("logits", c_void_p),
        ("num_rows", c_int64),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions")),
        *((name, c_void_p) for name in ("tokens", "sure")),
    ]


class SamplingRows(NamedTuple):
    """Sampling parameters by row: [num_rows] on the host, as for `kernels.sampling.reference.choose_tokens`."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    seeds: Tensor
    positions: Tensor


class NativeChoice:
    """Chooses tokens with the C++ library.

    Args:
        library: from `wingbeat.kernels.cpu.library`.
    """

    def __init__(self, library: CDLL) -> None:
        library.wingbeat_choose_tokens.argtypes, library.wingbeat_choose_tokens.restype = [POINTER(Sampling)], None
        self._choose = library.wingbeat_choose_tokens

    def choose(self, logits: Tensor, rows: SamplingRows, processors: LogitProcessors | None = None) -> Tensor:
        """Chooses a token per row, the same as `kernels.sampling.reference.choose_tokens` would.

        The last bits of numbers may differ between C++ and torch. Rows whose best two tokens are that close are passed
        to `choose_tokens`; top-p and min-p may end one token apart from torch's if a mass equals their limit to these
        bits.

        Args:
            logits: [num_rows, vocab_size] on the host, any float type.

        Returns:
            int64 [num_rows].
        """
        if processors is not None:
            logits = apply_processors(logits, processors)
        wide, count = logits.to(torch.float32).contiguous(), len(logits)
        tokens, sure = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.bool)
        rows = SamplingRows(*(column.contiguous() for column in rows))
        addresses = [column.data_ptr() for column in (*rows, tokens, sure)]
        self._choose(byref(Sampling(wide.data_ptr(), count, logits.shape[1], *addresses)))
        if not bool(sure.all()):
            left = (~sure).nonzero()[:, 0]
            theirs = (column[left] for column in rows)
            tokens[left] = choose_tokens(logits[left], *theirs, any_sampled=True, any_filtered=True)
        return tokens
