"""Train an EAGLE-3 head for a causal LM: distillation from the verifier, unrolled over the head's own predictions."""

from pathlib import Path
from typing import Any

import torch
from pydantic import Field, model_validator
from rich.progress import Progress
from torch import Tensor
from transformers import AutoTokenizer

from wingbeat.runtime.drafters.checkpoint import load_eagle_head, save_eagle_head
from wingbeat.runtime.drafters.eagle_head import EagleHead
from wingbeat.runtime.training.config import TrainingConfig
from wingbeat.runtime.training.corpus import WindowSampler, encode_documents, split_files
from wingbeat.runtime.training.evaluation import greedy_acceptance
from wingbeat.runtime.training.head_init import initial_head
from wingbeat.runtime.training.loop import StepResult, optimize, prepare, write_metrics
from wingbeat.runtime.training.rollouts import ROLLOUTS_FILE, RowSampler, make_rollouts
from wingbeat.runtime.training.unroll import distillation_loss
from wingbeat.runtime.training.verifier import FrozenVerifier

_EVALUATION_CHAIN = 5
_EVALUATION_PROMPTS = 64
_EVALUATION_TOKENS = 128


class TrainDrafterConfig(TrainingConfig):
    """Settings of `train_drafter`; the defaults suit a small verifier, the demo's in particular."""

    verifier: str = Field(description="Folder or hub name of the causal LM the head drafts for.")
    steps: int = Field(2000, gt=0, description="Optimizer steps in the whole run, resumed parts included.")
    batch_size: int = Field(8, gt=1, description="Sequences per step.")
    sequence_length: int = Field(256, gt=8, description="Tokens per training sequence.")
    learning_rate: float = Field(4e-3, gt=0, description="Peak learning rate, after warm-up and before the decay.")
    ttt_steps: int = Field(6, ge=1, le=16, description="Length of the chains the head is unrolled over.")
    step_decay: float = Field(0.9, gt=0, le=1, description="Weight of a chain's step relative to the one before.")
    tap_layers: tuple[int, ...] | None = Field(
        None, description="Layers whose input is tapped; by default (2, n // 2, n - 3), spread out for shallow models."
    )
    initial_head: Path | None = Field(
        None, description="Folder of a head to start from, for instance that of an earlier version of the verifier."
    )
    intermediate_size: int | None = Field(None, gt=0, description="Width of the head's MLP; by default the verifier's.")
    draft_vocab_size: int = Field(
        32000, gt=0, description="Most frequent tokens the head can draft; at most the verifier's vocabulary."
    )
    rollout_rows: int = Field(
        4096, ge=0, description="Sequences the verifier writes first, as training text; 0 trains on the corpus alone."
    )
    rollout_share: float = Field(0.75, ge=0, le=1, description="Share of the verifier's own text in a batch.")
    greedy_fraction: float = Field(0.75, ge=0, le=1, description="Share of the verifier's text written greedily.")
    temperature: float = Field(0.8, gt=0, description="Temperature of the rest.")

    @model_validator(mode="after")
    def _check_chain(self) -> "TrainDrafterConfig":
        if self.sequence_length <= self.ttt_steps + 1:
            raise ValueError(f"sequence_length={self.sequence_length} leaves no chain of ttt_steps={self.ttt_steps}")
        return self


def train_drafter(config: TrainDrafterConfig) -> None:
    """Train a head and write it in SpecForge's layout: config.json, model.safetensors and metrics.json.

    The head's embedding is the verifier's and is left out of the file. A run that was killed continues from its last
    checkpoint with the same losses.

    Raises:
        FileNotFoundError: the corpus is not a folder.
        ValueError: the corpus has too little text, or a tap names a layer the verifier lacks.
        FloatingPointError: the loss is not finite.
    """
    prepare(config)
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    verifier = FrozenVerifier(config.verifier, config.tap_layers, config.device, dtype)
    tokenizer = AutoTokenizer.from_pretrained(config.verifier)
    split = split_files(config.corpus, config.suffixes)
    corpus = WindowSampler(encode_documents(tokenizer, split.train), config.seed)
    rollouts = _rollouts(config, verifier, corpus)
    head = _start(config, verifier, corpus, rollouts).to(config.device)
    own_rows = round(config.batch_size * config.rollout_share) if config.rollout_rows else 0
    own_text = RowSampler(rollouts, config.seed) if own_rows else None
    loss_of = torch.compile(distillation_loss, dynamic=False) if config.compile else distillation_loss

    def step_loss(step: int) -> StepResult:
        parts = []
        if own_text is not None:
            parts.append(own_text.batch(step, own_rows))
        if own_rows < config.batch_size:
            parts.append(corpus.batch(step, config.batch_size - own_rows, config.sequence_length))
        tokens = torch.cat(parts).to(config.device)
        seen = verifier.observe(tokens)
        loss = loss_of(head, tokens, seen.taps, seen.logits, config.ttt_steps, config.step_decay)
        return StepResult(loss, tokens.numel())

    history = optimize(config, head, step_loss, lambda: save_eagle_head(head, config.output, with_embedding=False))
    write_metrics(
        config,
        history,
        num_parameters=sum(p.numel() for p in head.parameters() if p.requires_grad),
        draft_vocab_coverage=round(float(torch.isin(rollouts, head.draft_token_ids.cpu()).float().mean()), 4),
        acceptance=_acceptance(config, head, encode_documents(tokenizer, split.held_out)),
    )
    (config.output / ROLLOUTS_FILE).unlink(missing_ok=True)


def _rollouts(config: TrainDrafterConfig, verifier: FrozenVerifier, corpus: WindowSampler) -> Tensor:
    with Progress() as bar:
        task = bar.add_task("the verifier's own text", total=config.rollout_rows)
        return make_rollouts(
            verifier,
            corpus,
            config.output,
            num_rows=config.rollout_rows,
            length=config.sequence_length,
            greedy_fraction=config.greedy_fraction,
            temperature=config.temperature,
            seed=config.seed,
            on_rows=lambda count: bar.update(task, completed=count),
        )


def _start(config: TrainDrafterConfig, verifier: FrozenVerifier, corpus: WindowSampler, rollouts: Tensor) -> EagleHead:
    vocab_size = verifier.embedding.shape[0]
    if config.initial_head is not None:
        head = load_eagle_head(
            config.initial_head,
            target_hidden_size=verifier.hidden_size,
            target_num_layers=verifier.num_layers,
            target_vocab_size=vocab_size,
            target_embedding=verifier.embedding.float().clone(),
        )
        head.requires_grad_(True).embed_tokens.weight.requires_grad_(False)
        return head.train()
    return initial_head(
        verifier,
        corpus.token_counts(vocab_size) + torch.bincount(rollouts.flatten(), minlength=vocab_size),
        draft_vocab_size=config.draft_vocab_size,
        intermediate_size=config.intermediate_size,
        seed=config.seed,
    )


def _acceptance(config: TrainDrafterConfig, head: EagleHead, documents: list[Tensor]) -> dict[str, Any] | None:
    """Greedy chain acceptance on held-out text, in float32: the arithmetic the pair is served in on a CPU."""
    prompt_length = min(128, config.sequence_length // 2)
    if sum(map(len, documents)) < _EVALUATION_PROMPTS * prompt_length:
        return None
    verifier = FrozenVerifier(config.verifier, head.config.tap_layers, config.device, torch.float32)
    prompts = WindowSampler(documents, config.seed).batch(0, _EVALUATION_PROMPTS, prompt_length)
    measured = greedy_acceptance(
        head, verifier, prompts.to(config.device), num_tokens=_EVALUATION_TOKENS, num_steps=_EVALUATION_CHAIN
    )
    return {
        "prompts": _EVALUATION_PROMPTS,
        "prompt_tokens": prompt_length,
        "new_tokens": _EVALUATION_TOKENS,
        "chain": _EVALUATION_CHAIN,
        **measured._asdict(),
    }
