"""What recurrent states cost beside the verification they serve, and how much of a conversation they find again.

    .venv/bin/python benchmarks/recurrent_state.py [--quick]

The first table is of small random models, one per kind of mixer: chains are verified, a part of each is accepted, and
the mixers run again over that part. A round's verification and its replay are timed in the same rounds, medians of
their ratio; the last column runs whole mixers again, products and all, as a replay that keeps only their input would.
The second table is of conversations in the repository's own text: what the prefix cache finds where states are kept
every `state_interval` tokens, beside what blocks of keys and values alone would give.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from report import RESULTS, Report, Table, machine_facts
from told_drafter import ToldDrafter
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    JambaConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3_5TextConfig,
)

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import prepare_model

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 8192
CHAIN = SpeculationConfig(draft_steps=7, draft_top_k=1, verify_tree_size=8)
BATCHES = (1, 8)
PROMPT_LEN, NUM_TOKENS = 64, 48
SYSTEM_LEN, TURN_LENS, ANSWER_LEN, NUM_TURNS, NUM_CHATS = 300, (30, 170, 80, 260), 120, 6, 3
"""Tokens of what conversations share, of their questions in turn, of each answer."""
INTERVALS = (64, 256, 1024)

_KINDS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "initializer_range": 0.05,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def configs() -> dict[str, PreTrainedConfig]:
    """A model of 8 layers for each kind of mixer; heads and states as wide as published ones, but few."""
    return {
        "short convolution (lfm2)": Lfm2Config(**_SIZES, layer_types=["conv", "conv", "conv", "full_attention"] * 2),
        "gated delta net (qwen3_5)": Qwen3_5TextConfig(
            **_SIZES,
            head_dim=64,
            layer_types=_KINDS,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            linear_num_key_heads=4,
            linear_num_value_heads=8,
        ),
        "Mamba-2 (bamba)": BambaConfig(
            **_SIZES,
            attn_layer_indices=[3, 7],
            mamba_n_heads=16,
            mamba_d_head=64,
            mamba_d_state=128,
            mamba_n_groups=1,
        ),
        "Mamba-1 (jamba)": JambaConfig(
            **_SIZES, attn_layer_period=4, attn_layer_offset=3, mamba_dt_rank=32, num_experts=1, num_experts_per_tok=1
        ),
    }


def load(config: PreTrainedConfig) -> LoadedModel:
    """A model of random weights, as an engine takes it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return prepare_model(model, config.model_type)


@contextmanager
def timed(engine: Engine, whole_mixers: bool) -> Iterator[list[tuple[float, float]]]:
    """Seconds of (verification, replay) by round with trees, while entered.

    Args:
        whole_mixers: let the replay do the products around the recurrence again.
    """
    rounds: list[tuple[float, float]] = []
    forward, accept, verified = engine.runner.decode.forward, engine.states.accept, 0.0

    def verify(batch):
        nonlocal verified
        started = time.perf_counter()
        output = forward(batch)
        verified = time.perf_counter() - started
        return output

    def replay(seqs, paths):
        trees = engine.states._rows is not None
        started = time.perf_counter()
        if whole_mixers and trees:
            _products_again(engine, seqs, paths)
        accept(seqs, paths)
        if trees:
            rounds.append((verified, time.perf_counter() - started))

    engine.runner.decode.forward, engine.states.accept = verify, replay
    try:
        yield rounds
    finally:
        engine.runner.decode.forward, engine.states.accept = forward, accept


@torch.inference_mode()
def _products_again(engine: Engine, seqs: list, paths: list[list[int]]) -> None:
    """The products that a replay is spared: of the accepted rows, by each mixer's outer layers."""
    count = sum(len(path) for seq, path in zip(seqs, paths, strict=True) if seq is not None)
    for mixer in engine.states.mixers:
        inputs = engine.states._round.kept(mixer)[0][:count]
        for entry in mixer._entries:
            entry(inputs)
        if mixer._exit is not None:
            width = mixer.module.out_proj.in_features
            mixer._exit(inputs.new_zeros(count, width))


class Ratio(NamedTuple):
    """Medians over the rounds of one engine."""

    verify_ms: float
    replay: float
    """Over the verification."""
    tokens: float
    """Per round and sequence."""


def replay_ratios(loaded: LoadedModel, batch: int) -> tuple[Ratio, Ratio]:
    """As it is, and with the products around the recurrence done again."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(VOCAB_SIZE, (batch, PROMPT_LEN), generator=generator).tolist()
    texts = _write(engine_of(loaded, batch), prompts)
    told = ToldDrafter([prompt + text for prompt, text in zip(prompts, texts, strict=True)], VOCAB_SIZE)
    ratios = []
    for whole_mixers in (False, True):
        engine = engine_of(loaded, batch, _Chains(told))
        with timed(engine, whole_mixers) as rounds:
            if _write(engine, prompts) != texts:
                raise RuntimeError("the texts differ")
        verify = statistics.median(seconds for seconds, _ in rounds)
        share = statistics.median(replay / seconds for seconds, replay in rounds)
        ratios.append(Ratio(1e3 * verify, share, engine.speculation.acceptance_length))
    return ratios[0], ratios[1]


class _Chains(ToldDrafter):
    """Chains of what will be written, of which every third is wrong from its second token on."""

    def __init__(self, told: ToldDrafter) -> None:
        super().__init__(told.sequences, told.vocab_size)

    def _nodes(self, history: list[int]) -> list[tuple[int, int]]:
        length = len(history)
        known = next((sequence for sequence in self.sequences if sequence[:length] == history), history)
        upcoming = known[length : length + self._num_levels]
        self._num_trees += 1
        right = 1 if self._num_trees % 3 == 0 else 3
        return [(token if depth < right else 1 - min(token, 1), depth) for depth, token in enumerate(upcoming)]


def engine_of(loaded: LoadedModel, batch: int, drafter: ToldDrafter | None = None) -> Engine:
    """An engine of chains."""
    config = EngineConfig(max_num_seqs=batch, max_model_len=256, num_kv_blocks=200, speculation=CHAIN)
    return build_engine(loaded, config, drafter, InProcessChannel)


def _write(engine: Engine, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), tuple(prompt), params))
    texts: list[list[int]] = [[] for _ in prompts]
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[int(output.request_id)] += output.token_ids
    return texts


def hit_rates(loaded: LoadedModel, interval: int) -> tuple[float, float]:
    """(share of the prompts' tokens found, the share that blocks alone would give) over whole conversations."""
    tokenizer = Tokenizer.load(ROOT / "examples" / "demo_pair" / "verifier")
    text = "\n".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("architecture.md", "http_api.md"))
    tokens = iter(token % VOCAB_SIZE for token in tokenizer.encode(text))

    def take(count: int) -> list[int]:
        return [next(tokens) for _ in range(count)]

    longest = SYSTEM_LEN + NUM_TURNS * (max(TURN_LENS) + ANSWER_LEN)
    blocks = 1 + NUM_CHATS * (longest // 16 + 2)
    config = EngineConfig(
        max_num_seqs=1, max_model_len=longest + 16, num_kv_blocks=blocks, state_interval=interval, speculation=CHAIN
    )
    engine = build_engine(loaded, config, None, InProcessChannel)
    system, by_blocks = take(SYSTEM_LEN), 0
    chats, known = [list(system) for _ in range(NUM_CHATS)], [0] * NUM_CHATS
    for turn in range(NUM_TURNS):
        for index, chat in enumerate(chats):
            chat.extend(take(TURN_LENS[(turn + index) % len(TURN_LENS)]))
            shared = known[index] if turn else min(SYSTEM_LEN, SYSTEM_LEN * index)
            by_blocks += min(shared, len(chat) - 1) // 16 * 16
            chat.extend(_write(engine, [chat], ANSWER_LEN)[0])
            known[index] = len(chat) - 1
    books = engine.block_manager
    return books.hit_tokens / books.query_tokens, by_blocks / books.query_tokens


def main() -> None:
    """Measure and write down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two kinds of mixers at a batch of 1")
    parser.add_argument("--output", default=str(RESULTS / "recurrent_state.json"), help="file of the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, figures = [], {}
    kinds = configs()
    for name in list(kinds)[: 2 if options.quick else None]:
        loaded = load(kinds[name])
        for batch in BATCHES[: 1 if options.quick else None]:
            own, whole = replay_ratios(loaded, batch)
            cells = (f"{own.verify_ms:.1f}", f"{own.tokens:.1f}", f"{own.replay:.2f}", f"{whole.replay:.2f}")
            rows.append((name, str(batch), *cells))
            figures[f"{name} at {batch}"] = own._asdict() | {"with_products": whole.replay}
    columns = ("mixer", "batch", "verify ms", "tokens per round", "replay / verify", "with products / verify")
    tables = [Table("Replay of accepted paths beside verification of chains of 8", columns, rows)]
    small = load(
        Lfm2Config(
            **(_SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}),
            layer_types=["conv", "full_attention"],
        )
    )
    hits = {interval: hit_rates(small, interval) for interval in INTERVALS}
    figures["hit_rates"] = {str(interval): rates for interval, rates in hits.items()}
    rows = [(str(interval), f"{found:.1%}", f"{blocks:.1%}") for interval, (found, blocks) in hits.items()]
    columns = ("state_interval", "prompt tokens found", "by blocks alone")
    tables.append(Table(f"{NUM_CHATS} conversations of {NUM_TURNS} turns, one after the other", columns, rows))
    report = Report("Recurrent state", machine_facts(), tables, figures)
    report.show()
    report.save(Path(options.output))


if __name__ == "__main__":
    main()
