"""Acceptance length behind drawings of digits and behind the same digits in words, of a tiny pair that is trained here.

    .venv/bin/python benchmarks/vl_pair.py [--pair DIR] [--steps N] [--head-steps N] [--prompts N]

A Qwen3-VL of under a million weights learns to read tables of digits, drawn or written, and an EAGLE-3 head to draft
for it. Both are written to the folder, and found there another time. The drawings are then drafted for with less than
what a drafter is told, too: with positions that are off by one on an axis, with the embedding of the token that stands
for an image in the place of the image's own, and with neither. The text must be the same each time.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import drawn_digits as digits
import numpy as np
import torch
from local_engine import quiet
from report import Report, Table, machine_facts
from torch import Tensor
from torch.nn import functional

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.eagle import EagleDrafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.eagle3 import EagleHead, EagleHeadConfig
from wingbeat.runtime.heads.load import load_eagle_head
from wingbeat.runtime.heads.save import save_eagle_head
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.heads.unroll import unroll
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.media import telling
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model

SHAPES = {"chain of 4": SpeculationConfig(5, 1, 5), "default tree": SpeculationConfig()}
WRITTEN, DRAWN = "written", "drawn"
TAP_LAYERS = (1, 2, 3)
_DRAFTED = 4
_BATCH = 32
Say = Callable[[str], object]


def train_verifier(num_steps: int, say: Say) -> digits.Model:
    """A model that reads tables; a linear layer that names each drawn digit helps its encoder along at first."""
    model, random = digits.new_model(0), np.random.default_rng(0)
    names = torch.nn.Linear(model.config.text_config.hidden_size, 10)
    optimizer = torch.optim.AdamW([*model.parameters(), *names.parameters()], lr=2e-3, weight_decay=0.01)
    for step in range(num_steps):
        _schedule(optimizer, step, num_steps, 2e-3)
        optimizer.zero_grad()
        right = []
        for shown in (True, False):
            given = digits.batch(random, _BATCH, shown)
            read = digits.hidden_states(model, given)
            logits = model.lm_head(read.hidden[:, given.num_prompt_tokens - 1 : -1])
            target = given.token_ids[:, given.num_prompt_tokens :]
            loss = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
            if shown:
                drawn = read.embeddings[given.token_ids == digits.PLACEHOLDER]
                loss = loss + functional.cross_entropy(names(drawn), target[target < 10])
            loss.backward()
            right.append((logits.argmax(-1) == target)[target < 10].float().mean().item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == num_steps - 1:
            say(f"verifier, step {step}: {right[0]:.1%} of drawn digits and {right[1]:.1%} of written ones are right")
    return model.eval().requires_grad_(False)


def train_head(model: digits.Model, num_steps: int, say: Say) -> EagleHead:
    """An EAGLE-3 head, unrolled over its own predictions as it will draft."""
    torch.manual_seed(1)
    head, random = EagleHead(head_config(model)), np.random.default_rng(1)
    head.embed_tokens.weight.data.copy_(model.get_input_embeddings().weight)
    head.embed_tokens.requires_grad_(False)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01)
    for step in range(num_steps):
        _schedule(optimizer, step, num_steps, 2e-3)
        optimizer.zero_grad()
        right = []
        for shown in (True, False):
            given = digits.batch(random, _BATCH, shown)
            with torch.no_grad():
                read = digits.hidden_states(model, given, TAP_LAYERS)
                target = model.lm_head(read.hidden)
            loss, accepted = _draft_loss(head, given, read, target)
            loss.backward()
            right.append(accepted)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == num_steps - 1:
            say(f"head, step {step}: {right[0]:.2f} of {_DRAFTED} tokens behind drawings, {right[1]:.2f} behind words")
    return head.eval().requires_grad_(False)


def head_config(model: digits.Model) -> EagleHeadConfig:
    """A layer of the model's own shapes, turned as its layers are."""
    text = model.config.text_config
    rope = text.rope_parameters
    return EagleHeadConfig(
        hidden_size=text.hidden_size,
        intermediate_size=2 * text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        target_hidden_size=text.hidden_size,
        tap_layers=TAP_LAYERS,
        vocab_size=text.vocab_size,
        draft_vocab_size=text.vocab_size,
        rope_parameters={"rope_type": "default", "rope_theta": rope["rope_theta"]},
        max_position_embeddings=text.max_position_embeddings,
        mrope_section=tuple(rope["mrope_section"]),
        mrope_interleaved=rope["mrope_interleaved"],
    )


def _draft_loss(head: EagleHead, given: digits.Batch, read: digits.Read, target: Tensor) -> tuple[Tensor, float]:
    """Of the chains that begin in answers, and the tokens of a chain that are right one after the other."""
    begin, losses, hits = given.num_prompt_tokens - 1, [], []
    for step in unroll(head, read.embeddings, read.taps, _DRAFTED, given.axes):
        logits = step.logits[:, begin:]
        wanted = target[:, begin + step.offset - 1 :][:, : logits.shape[1]]
        losses.append(functional.cross_entropy(logits.flatten(0, 1), wanted.softmax(-1).flatten(0, 1)))
        hits.append(logits.argmax(-1) == wanted.argmax(-1))
    accepted = torch.stack(hits).cumprod(dim=0).sum(dim=0).float().mean().item()
    return torch.stack(losses).mean(), accepted


def _schedule(optimizer: torch.optim.Optimizer, step: int, num_steps: int, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate * min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / num_steps))


class Served:
    """The pair as it is on disk."""

    def __init__(self, folder: Path) -> None:
        self.loaded: LoadedModel = load_model(folder / "verifier", torch.float32, torch.device("cpu"))
        target = TargetDescription.from_checkpoint(folder / "verifier")
        self.head = load_eagle_head(
            folder / "drafter",
            target_hidden_size=target.hidden_size,
            target_num_layers=target.num_layers,
            target_vocab_size=target.vocab_size,
            target_embedding=target.embedding,
            target_lm_head=target.lm_head,
            dtype=torch.float32,
            device="cpu",
        )

    def acceptance(
        self, examples: list[digits.Example], speculation: SpeculationConfig
    ) -> tuple[float, list[list[int]]]:
        """Tokens per draft, and what is written."""
        config = EngineConfig(
            max_num_seqs=8, max_model_len=digits.MOST_TOKENS, num_kv_blocks=400, speculation=speculation
        )
        engine = build_engine(self.loaded, config, EagleDrafter(self.head, speculation), InProcessChannel)
        try:
            return _written(engine, examples)
        finally:
            engine.model.remove_taps()


def _written(engine: Engine, examples: list[digits.Example]) -> tuple[float, list[list[int]]]:
    tokens: list[list[int]] = [[] for _ in examples]
    for index, one in enumerate(examples):
        params = SamplingParams(max_tokens=len(one.answer), temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(index), tuple(one.prompt), params, media=one.media))
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] += output.token_ids
    return engine.speculation.acceptance_length, tokens


@contextmanager
def told_less(what: str) -> Iterator[None]:
    """Drafters are told something else of the drawings."""
    rotations = telling.rotations

    def moved(media: tuple, begin: int, end: int) -> np.ndarray:
        return rotations(media, begin, end) + np.eye(3, dtype=np.int64)[:, [("time", "row", "column").index(what)]]

    if what in ("time", "row", "column"):
        with patch.object(telling, "rotations", moved):
            yield
    elif what == "placeholders":
        with patch.object(telling, "_embed", lambda encoder, outcome, *rest: outcome.chunk_shown.zero_()):
            yield
    else:
        with patch("wingbeat.runtime.media.rows.tell", lambda *args: 0):
            yield


LESS = {
    "off by one on the axis of time": "time",
    "off by one on the axis of rows": "row",
    "off by one on the axis of columns": "column",
    "the placeholder's embedding": "placeholders",
    "told nothing": "nothing",
}


def measure(pair: Served, num_prompts: int) -> tuple[list[tuple[str, ...]], list[dict]]:
    """Rows of the table, and the figures."""
    rows, figures = [], []
    for shape, speculation in SHAPES.items():
        found = {}
        for kind in (WRITTEN, DRAWN):
            random = np.random.default_rng(99)
            examples = [
                digits.example(random, kind == DRAWN, digits.GRIDS[index % len(digits.GRIDS)], index % 9)
                for index in range(num_prompts)
            ]
            found[kind], texts = pair.acceptance(examples, speculation)
            right = np.mean([text == one.answer for text, one in zip(texts, examples, strict=True)])
            figures.append({"shape": shape, "prompts": kind, "acceptance": found[kind], "right": float(right)})
        for name, what in LESS.items():
            with told_less(what):
                found[name], others = pair.acceptance(examples, speculation)
            if others != texts:
                raise SystemExit(f"{shape}, {name}: what a drafter is told changed the text")
            figures.append({"shape": shape, "prompts": f"drawn, {name}", "acceptance": found[name]})
        for name, length in found.items():
            rows.append((shape, name, f"{length:.2f}", f"{length / found[WRITTEN]:.2f}"))
    return rows, figures


def main() -> None:
    """Train what is not there, measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, help="folder of the pair; a new one without it")
    parser.add_argument("--steps", type=int, default=800, help="of the verifier's training")
    parser.add_argument("--head-steps", type=int, default=400, help="of the head's")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    quiet()
    folder = args.pair or Path(mkdtemp(prefix="vl-pair-"))
    if not (folder / "verifier" / "config.json").exists():
        train_verifier(args.steps, print).save_pretrained(folder / "verifier")
    if not (folder / "drafter" / "config.json").exists():
        model = digits.Model.from_pretrained(folder / "verifier").eval().requires_grad_(False)
        save_eagle_head(train_head(model, args.head_steps, print), folder / "drafter")
    rows, figures = measure(Served(folder), args.prompts)
    facts = machine_facts() | {"pair": str(folder), "workload": f"{args.prompts} tables of 8 to 12 digits, greedy"}
    table = Table("Acceptance length", ("draft", "digits", "acceptance length", "by that of written ones"), rows)
    report = Report("A drafter that sees", facts, [table], {"runs": figures})
    report.show()
    if args.output is not None:
        report.save(args.output)


if __name__ == "__main__":
    main()
