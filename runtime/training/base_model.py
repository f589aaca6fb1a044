"""Train a small Llama on a folder of text: the demo's verifier, made from nothing but the files at hand."""

import math
from pathlib import Path

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from wingbeat.runtime.recordings.corpus import WindowSampler, encode_documents, split_files, texts
from wingbeat.runtime.training.byte_bpe import train_tokenizer
from wingbeat.runtime.training.loop import Inputs, Task, autocast, optimize, prepare, write_metrics
from wingbeat.runtime.training.parallel import Part, Ranks, joined
from wingbeat.runtime.training.run_config import TrainingConfig
from wingbeat.runtime.training.state import STATE_FILE


class TrainBaseConfig(TrainingConfig):
    """Settings of `train_base`; the defaults are the demo verifier's."""

    steps: int = Field(1500, gt=0, description="Optimizer steps in the whole run, resumed parts included.")
    batch_size: int = Field(8, gt=0, description="Sequences per step.")
    sequence_length: int = Field(512, gt=1, description="Tokens per training sequence.")
    final_fraction: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Last part of the run, in which sequences have the full context's length.",
    )
    learning_rate: float = Field(5e-3, gt=0, description="Peak learning rate, after warm-up and before the decay.")
    warmup_steps: int = Field(100, ge=0, description="Steps over which the learning rate rises linearly.")
    vocab_size: int = Field(4096, ge=512, description="Entries of the tokenizer that is trained first.")
    hidden_size: int = Field(160, gt=0, description="Width of the residual stream.")
    intermediate_size: int = Field(320, gt=0, description="Width of the MLP.")
    num_layers: int = Field(24, gt=0, description="Decoder layers.")
    num_attention_heads: int = Field(5, gt=0, description="Query heads; they divide the hidden size.")
    num_key_value_heads: int = Field(1, gt=0, description="Key and value heads; they divide the query heads.")
    max_position_embeddings: int = Field(2048, gt=1, description="Longest context, in tokens.")

    @model_validator(mode="after")
    def _check_shapes(self) -> "TrainBaseConfig":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.sequence_length > self.max_position_embeddings:
            raise ValueError(
                f"sequence_length={self.sequence_length} is above "
                f"max_position_embeddings={self.max_position_embeddings}"
            )
        return self


def train_base(config: TrainBaseConfig) -> None:
    """Train tokenizer and model, and write a folder that `AutoModelForCausalLM.from_pretrained` reads.

    Writes config.json, model.safetensors (bfloat16), generation_config.json, the tokenizer with its chat template and
    metrics.json with the held-out loss. A run that was killed continues from its last checkpoint with the same losses.

    Raises:
        FileNotFoundError: the corpus is not a folder.
        ValueError: the corpus has too little text.
        FloatingPointError: the loss is not finite.
    """
    with joined(config.device) as ranks:
        _train(config, ranks)


def _train(config: TrainBaseConfig, ranks: Ranks) -> None:
    prepare(config)
    split = split_files(config.corpus, config.suffixes)
    tokenizer = _tokenizer(config, ranks, split.train)
    sampler = WindowSampler(encode_documents(tokenizer, split.train), config.seed)
    model = _build_model(config, tokenizer).to(ranks.device).train()
    long_from = config.steps - int(config.final_fraction * config.steps)
    long_batch = config.batch_size * config.sequence_length // config.max_position_embeddings

    def inputs(step: int, part: Part) -> Inputs:
        if step < long_from:
            windows = sampler.rows(step * config.batch_size, part.rows(config.batch_size), config.sequence_length)
        else:
            # Whole parts, at least one row each.
            rows = max(1, long_batch // part.count) * part.count
            windows = sampler.rows((step - long_from) * rows, part.rows(rows), config.max_position_embeddings)
        return Inputs((windows.to(ranks.device),), windows.numel())

    task = Task(model, _NextTokenLoss(model), inputs, lambda: _export(config, model, tokenizer))
    history = optimize(config, ranks, task)
    if ranks.is_first:
        documents = encode_documents(tokenizer, split.held_out)
        num_bytes = sum(len(text.encode()) for text in texts(split.held_out))
        write_metrics(
            config,
            history,
            num_parameters=sum(p.numel() for p in model.parameters()),
            corpus={
                "train_files": len(split.train),
                "held_out_files": len(split.held_out),
                "tokens": sampler.num_tokens,
            },
            held_out=_held_out_loss(config, model, documents, num_bytes),
        )


def _tokenizer(config: TrainBaseConfig, ranks: Ranks, files: list[Path]) -> PreTrainedTokenizerBase:
    if ranks.is_first and not (config.resume and (config.output / STATE_FILE).exists()):
        tokenizer = train_tokenizer(texts(files), config.vocab_size, config.max_position_embeddings)
        tokenizer.save_pretrained(config.output)
    ranks.wait_for_first()
    return AutoTokenizer.from_pretrained(config.output)


def _build_model(config: TrainBaseConfig, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    torch.manual_seed(config.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class _NextTokenLoss(nn.Module):
    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, windows: Tensor) -> Tensor:
        return _loss(self.model, windows)


def _loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(input_ids=windows, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def _export(config: TrainBaseConfig, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    # Tied tensors must stay one object, or the file would hold them twice.
    stored: dict[int, Tensor] = {}
    weights = {
        name: stored.setdefault(tensor.data_ptr(), tensor.detach().to(torch.bfloat16))
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(config.output, state_dict=weights)
    tokenizer.save_pretrained(config.output)


@torch.no_grad()
def _held_out_loss(
    config: TrainBaseConfig, model: LlamaForCausalLM, documents: list[Tensor], num_bytes: int
) -> dict[str, float] | None:
    """Mean loss in nats per token over the held-out files, cut into sequences, and the same in bits per byte."""
    if not documents:
        return None
    model.eval()
    total, count = 0.0, 0
    for window in torch.cat(documents).split(config.sequence_length):
        if len(window) < 2:
            continue
        with autocast(config):
            loss = _loss(model, window[None].to(config.device))
        total += float(loss) * (len(window) - 1)
        count += len(window) - 1
    mean = total / count
    return {"nats_per_token": round(mean, 4), "bits_per_byte": round(total / math.log(2) / num_bytes, 4)}
