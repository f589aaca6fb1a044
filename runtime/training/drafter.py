"""Trains a draft head for a causal LM: distillation from the verifier, unrolled over the head's own predictions."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wingbeat.runtime.corpus import split_files
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.recordings.format import Record
from wingbeat.runtime.recordings.frozen_verifier import FrozenVerifier
from wingbeat.runtime.recordings.token_windows import WindowSampler, encode_documents
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.training.drafter_config import TrainDrafterConfig
from wingbeat.runtime.training.evaluation import (
    HeadAcceptance,
    Matches,
    first_learnt,
    greedy_acceptance,
    recorded_acceptance,
)
from wingbeat.runtime.training.families import FAMILIES
from wingbeat.runtime.training.family import Family, TrainedHead
from wingbeat.runtime.training.loop import Inputs, Task, optimize, precision, prepare, write_metrics
from wingbeat.runtime.training.parallel import Part, Ranks, joined
from wingbeat.runtime.training.rollouts import ROLLOUTS_FILE
from wingbeat.runtime.training.sources import LiveSource, RecordedSource, Source
from wingbeat.runtime.training.validation import ChannelFactory, EngineValidation
from wingbeat.runtime.training.verifier_weights import weights_of_checkpoint, weights_of_model

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


def train_drafter(config: TrainDrafterConfig, channel_factory: ChannelFactory | None = None) -> None:
    """Train a head and write config.json, model.safetensors and metrics.json.

    The written file omits the verifier's weights: the embedding and, for EAGLE-1, the output matrix. A killed run that
    is started again continues from its last checkpoint, and computes the same losses as a run without the interruption.
    Under torchrun each batch is split over the processes.

    Args:
        config: settings of the run.
        channel_factory: `cluster.channels.channel.InProcessChannel`; None skips measurements by the engine.

    Raises:
        FileNotFoundError: the corpus is not a folder.
        ValueError: the corpus has too little text, a tap layer does not exist in the verifier or the recording, or the
            batch does not split into equal parts.
        FloatingPointError: the loss is not finite.
    """
    with joined(config.device) as ranks:
        prepare(config)
        _train(config, ranks, channel_factory)


def _train(config: TrainDrafterConfig, ranks: Ranks, channel_factory: ChannelFactory | None) -> None:
    folder = checkpoint_folder(config.verifier)
    target = TargetDescription.from_checkpoint(folder)
    family = FAMILIES[config.family]
    tap_layers, chain = family.tap_layers(config, target), family.chain(config)
    tokenizer = Tokenizer.load(folder).hugging_face
    split = split_files(config.corpus, config.suffixes)
    source: Source
    if config.recordings is None:
        verifier = FrozenVerifier(str(folder), tap_layers, ranks.device, precision(config))
        source = LiveSource(config, ranks, verifier, encode_documents(tokenizer, split.train))
        weights = weights_of_model(verifier)
        judged = encode_documents(tokenizer, split.held_out) if config.validation_prompts else []
        held_out = held_out_text(config, target, judged, chain, ranks, folder)
    else:
        source = RecordedSource(config, config.recordings, folder, tap_layers, ranks.device)
        weights = weights_of_checkpoint(target)
        held_out = held_out_records(list(source.judged(config.validation_prompts)), target, chain, ranks.device)
    head = family.new_head(config, target, weights, source.token_weights()).to(ranks.device)

    def export(path: Path) -> None:
        family.export(head, config, folder, path)

    def inputs(step: int, part: Part) -> Inputs:
        return family.inputs(config, source.inputs(step, part), step, part)

    engine = None
    if channel_factory is not None and held_out is not None:
        prompts, dtype = held_out.prompts, served_dtype(ranks.device)
        engine = EngineValidation(
            folder, prompts, held_out.new_tokens, chain, channel_factory, dtype, ranks.device, family.inside_verifier
        )
    loss = family.loss(head, config)
    task = Task(
        head,
        loss,
        inputs,
        accepted=lambda: getattr(loss, "accepted", []),
        export=lambda: export(config.output),
        validate=None if engine is None else lambda: engine.measure(export),
        validation_interval_steps=config.validation_interval_steps,
    )
    history = optimize(config, ranks, task)
    if ranks.is_first:
        write_metrics(
            config,
            history,
            num_parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),
            draft_vocab_coverage=_coverage(source, head),
            acceptance=None if held_out is None else _simulated(family, head, held_out, chain),
        )
        (config.output / ROLLOUTS_FILE).unlink(missing_ok=True)


def _coverage(source: Source, head: TrainedHead) -> float:
    """Share of the measurement text's tokens that are in the head's draft vocabulary."""
    counts = source.judged_token_counts()
    return round(float(counts[head.draft_token_ids.cpu()].sum() / counts.sum().clamp_min(1)), 4)


def _simulated(family: Family, head: TrainedHead, held_out: HeldOut, chain: int) -> dict[str, Any]:
    """Acceptance of greedy chains, simulated without an engine."""
    measured = held_out.measure(head, partial(family.matches, head))
    return {
        "prompts": len(held_out.prompts),
        "new_tokens": held_out.new_tokens,
        "chain": chain,
        **measured._asdict(),
    }
