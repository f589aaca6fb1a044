"""Rows, logits and processors for the sampling kernels, and a reference that breaks ties by token id."""

from typing import NamedTuple

import torch

from wingbeat.kernels.sampling import reference as sampling
from wingbeat.kernels.sampling.processors import LogitBias, LogitProcessors, Penalties


class Rows(NamedTuple):
    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    def to(self, device: str) -> "Rows":
        return Rows(*(column.to(device) for column in self))


PARAMETERS = [  # temperature, top_k, top_p, min_p
    (0.7, 0, 0.9, 0.0),
    (1.0, 5000, 0.95, 0.05),
    (2.0, 17, 0.6, 0.02),
    (1.3, 40, 1.0, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1e-9, 0.0),
    (0.0, 5, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (1.0, 1, 0.5, 0.0),
    (1e-3, 0, 0.99, 0.0),
    (0.9, 0, 1.0, 1.0),
]


def mixed_rows(num_rows: int) -> Rows:
    chosen = [PARAMETERS[row % len(PARAMETERS)] for row in range(num_rows)]
    return Rows(*(torch.tensor(column) for column in zip(*chosen, strict=True)))


def random_logits(num_rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2
    if kind == "tied":
        logits = logits.round()
    if kind == "masked":
        logits[:, 1::3] = float("-inf")
    if kind == "equal":
        logits[:] = -0.0
        logits[:, ::2] = 0.0
    return logits


def sorted_reference(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """`process_logits` by a full sort, which breaks ties by token id."""
    temperatures, top_ks, top_ps, min_ps = rows
    scaled = logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    filtered = (temperatures > 0) & ((top_ks > 0) | (top_ps < 1) | (min_ps > 0))
    return torch.where(filtered[:, None], sampling._filter(scaled, top_ks, top_ps, min_ps), scaled)


def random_processors(num_rows: int, vocab_size: int, path_length: int = 3) -> LogitProcessors:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    penalties = Penalties(
        repetition=0.5 + 1.5 * random(num_rows),
        presence=random(num_rows) - 0.3,
        frequency=random(num_rows) - 0.3,
        slots=torch.randint(-1, 3, (num_rows,), generator=generator),
        prompt_mask=random(3, vocab_size) < 0.2,
        output_counts=((random(3, vocab_size) < 0.2) * (5 * random(3, vocab_size))).to(torch.int32),
        path_token_ids=torch.randint(-1, vocab_size, (num_rows, path_length), generator=generator),
    )
    # A token twice on one path counts twice.
    penalties.path_token_ids[:, -1] = penalties.path_token_ids[:, 0]
    penalties.repetition[0], penalties.presence[0], penalties.frequency[0] = 1.0, 0.0, 0.0
    bias = LogitBias(random(2, vocab_size) * 4 - 2, torch.randint(-1, 2, (num_rows,), generator=generator))
    words = torch.randint(-(2**31), 2**31, (num_rows, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    words[-1] = -1
    return LogitProcessors(penalties, bias, words)


def to_device(value, device: str):
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return value if value is None else type(value)(*(to_device(field, device) for field in value))
