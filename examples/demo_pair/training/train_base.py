"""Trains the demo's verifier or its draft model, a small Llama, with a byte-level tokenizer for code, from text files.

    .venv/bin/python examples/demo_pair/training/train_base.py --output runs/verifier

The output folder can be read by `AutoModelForCausalLM.from_pretrained`; its metrics.json contains the held-out loss.
The learning rate is constant after a warm-up and then falls linearly to zero; the last steps use sequences of the full
context length.
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from wingbeat.runtime.corpus import split_files, texts
from wingbeat.runtime.recordings.token_windows import WindowSampler, encode_documents
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.training.optimizers import build_optimizers

SETTINGS = {
    "seed": 0,
    "device": "cpu",
    "steps": 1500,
    "batch_size": 8,
    "sequence_length": 512,
    "learning_rate": 5e-3,
    "warmup_steps": 100,
    "decay_fraction": 0.4,
    "final_fraction": 0.1,
    "vocab_size": 4096,
    "hidden_size": 160,
    "intermediate_size": 320,
    "num_layers": 24,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
}
"""Settings of the demo verifier. The last `final_fraction` of the steps use full contexts; the learning rate falls over
the last `decay_fraction`."""
END_OF_TEXT = "<|endoftext|>"

# Words include their leading space; digits are single tokens; a newline includes the indentation behind it, so that one
# token means "next line at this depth"; the rest of a run of spaces is one piece.
_SPLIT = r"\n+ *| ?[A-Za-z_]+| ?[^\sA-Za-z_\d]+|\d| +(?=\S)|\s"

# Messages become comments, the form in which prose precedes code in the training corpus.
CHAT_TEMPLATE = (
    '{%- if tools -%}{{ \'# tools, called by <tool_call>{"name": ..., "arguments": {...}}</tool_call>:\\n\' }}'
    "{%- for tool in tools -%}{{ '# ' + tool | tojson + '\\n' }}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}{{ message['content'] + '\\n\\n' }}"
    "{%- else -%}{{ '# ' + message['role'] + ': ' + message['content'] | replace('\\n', '\\n# ') + '\\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '\\n' }}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_length: int) -> PreTrainedTokenizerFast:
    """Trains a tokenizer of `vocab_size` entries; token 0 is the document separator, used as bos and eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def train(output: Path, corpus: Path, settings: argparse.Namespace) -> None:
    """Trains tokenizer and model; writes both and metrics.json.

    Raises:
        FileNotFoundError: the corpus is not a folder.
        ValueError: the corpus has too little text.
    """
    torch.manual_seed(settings.seed)
    split = split_files(corpus)
    tokenizer = train_tokenizer(texts(split.train), settings.vocab_size, settings.max_position_embeddings)
    sampler = WindowSampler(encode_documents(tokenizer, split.train), settings.seed)
    model = build_model(tokenizer, settings).to(settings.device).train()
    optimizers = build_optimizers(model, settings.learning_rate)
    step_loss = torch.compile(loss_of, dynamic=False) if settings.compile else loss_of
    long_from = settings.steps - int(settings.final_fraction * settings.steps)
    long_rows = max(1, settings.batch_size * settings.sequence_length // settings.max_position_embeddings)
    losses = []
    for step in tqdm(range(settings.steps)):
        if step < long_from:
            windows = sampler.batch(step, settings.batch_size, settings.sequence_length)
        else:
            windows = sampler.batch(step - long_from, long_rows, settings.max_position_embeddings)
        loss = step_loss(model, windows.to(settings.device))
        loss.backward()
        losses.append(round(loss.item(), 4))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * rate_scale(step, settings)
            optimizer.step()
            optimizer.zero_grad()
    export(model, output)
    tokenizer.save_pretrained(output)
    documents = encode_documents(tokenizer, split.held_out)
    num_bytes = sum(len(text.encode()) for text in texts(split.held_out))
    metrics = {
        "settings": {name: getattr(settings, name) for name in SETTINGS},
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "held_out": held_out_loss(model, documents, num_bytes, settings.sequence_length),
        "losses": losses,
    }
    (output / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")


def build_model(tokenizer: PreTrainedTokenizerFast, settings: argparse.Namespace) -> LlamaForCausalLM:
    """Creates the Llama with random weights, in float32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.intermediate_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_attention_heads,
            num_key_value_heads=settings.num_key_value_heads,
            max_position_embeddings=settings.max_position_embeddings,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean next-token loss of windows int64 [batch_size, length], with matrix products in bfloat16."""
    with torch.autocast(windows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=windows, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


def rate_scale(step: int, settings: argparse.Namespace) -> float:
    """Learning rate at a step, as a share of the peak."""
    warmup = (step + 1) / (settings.warmup_steps + 1)
    return min(warmup, (settings.steps - step) / max(1.0, settings.decay_fraction * settings.steps), 1.0)


@torch.no_grad()
def held_out_loss(model: nn.Module, documents: list[Tensor], num_bytes: int, length: int) -> dict[str, float] | None:
    """Mean loss over the tokens of held-out documents, cut into sequences: in nats per token, and in bits per byte."""
    if not documents:
        return None
    model.eval()
    device = next(model.parameters()).device
    windows = [window for window in torch.cat(documents).split(length) if len(window) > 1]
    nats = sum(float(loss_of(model, window[None].to(device))) * (len(window) - 1) for window in windows)
    num_tokens = sum(len(window) - 1 for window in windows)
    return {"nats_per_token": round(nats / num_tokens, 4), "bits_per_byte": round(nats / math.log(2) / num_bytes, 4)}


def export(model: LlamaForCausalLM, output: Path) -> None:
    """Writes the weights in bfloat16. Tied tensors stay one object, or the file would contain them twice."""
    stored: dict[int, Tensor] = {}
    weights = {
        name: stored.setdefault(tensor.data_ptr(), tensor.detach().to(torch.bfloat16))
        for name, tensor in model.state_dict().items()
    }
    model.save_pretrained(output, state_dict=weights)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--corpus", type=Path, default=stdlib_root(), help="folder of Python files")
    parser.add_argument("--compile", action="store_true", help="compile the training step by torch.compile")
    for name, value in SETTINGS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help=f"default: {value}")
    return parser.parse_args(words)


if __name__ == "__main__":
    chosen = vars(arguments())
    train(chosen.pop("output"), chosen.pop("corpus"), argparse.Namespace(**chosen))
