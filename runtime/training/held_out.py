"""Held-out text for measuring a drafter: answers of a recording, or prompts from held-out files."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.token_windows import WindowSampler
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.evaluation import (
    HeadAcceptance,
    Matches,
    first_learnt,
    greedy_acceptance,
    recorded_acceptance,
)
from wingbeat.runtime.training.family import TrainedHead
from wingbeat.runtime.training.parallel import Ranks

_PROMPT_TOKENS = NEW_TOKENS = 128


class HeldOut(NamedTuple):
    """Prompts and texts on which acceptance is measured."""

    prompts: list[list[int]]
    new_tokens: int
    """Number of tokens to generate after each prompt."""
    measure: Callable[[TrainedHead, Matches], HeadAcceptance]
    """Function that measures the acceptance of a head without an engine."""


def served_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a verifier is served on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def held_out_records(
    records: list[Record], target: TargetDescription, chain: int, device: torch.device
) -> HeldOut | None:
    """Recorded answers with their prompts; None if the recording has no held-out answers.

    If a record has no prompt, its first half is used as the prompt.
    """
    prompts = [record.token_ids[: first_learnt(record) or len(record.token_ids) // 2].tolist() for record in records]
    new_tokens = _new_tokens(target, max(map(len, prompts), default=0), chain)
    if not records or new_tokens < 1:
        return None

    def measure(_: TrainedHead, matches: Matches) -> HeadAcceptance:
        def here(token_ids: Tensor, taps: Tensor, num_steps: int) -> Tensor:
            return matches(token_ids.to(device), taps.to(device), num_steps).cpu()

        return recorded_acceptance(here, records, chain)

    return HeldOut(prompts, new_tokens, measure)


def held_out_text(
    config: TrainDrafterConfig,
    target: TargetDescription,
    documents: list[Tensor],
    chain: int,
    ranks: Ranks,
    folder: Path,
) -> HeldOut | None:
    """Prompts of held-out documents, continued greedily by the verifier; None if there is too little text.

    Args:
        config: settings of the run.
        target: the verifier.
        documents: int64 [length] each.
        chain: length of the chains.
        ranks: rank of this process, and number of processes.
        folder: folder of the verifier.
    """
    length = min(_PROMPT_TOKENS, config.sequence_length // 2)
    new_tokens = _new_tokens(target, length, chain)
    wanted = config.validation_prompts * length
    if not wanted or sum(map(len, documents)) < wanted or new_tokens < 1:
        return None
    text = WindowSampler(documents, config.seed).batch(0, config.validation_prompts, length)

    def measure(head: TrainedHead, matches: Matches) -> HeadAcceptance:
        """Measures a head's acceptance, with the verifier in the dtype in which it is served."""
        verifier = FrozenVerifier(str(folder), head.tap_layers, ranks.device, served_dtype(ranks.device))
        return greedy_acceptance(matches, verifier, text.to(ranks.device), num_tokens=new_tokens, num_steps=chain)

    return HeldOut(text.tolist(), new_tokens, measure)


def _new_tokens(target: TargetDescription, prompt_tokens: int, chain: int) -> int:
    """Maximum number of tokens to generate after a prompt of this length."""
    positions = getattr(target.config, "max_position_embeddings", None) or prompt_tokens + NEW_TOKENS + chain + 1
    return min(NEW_TOKENS, positions - prompt_tokens - chain - 1)
