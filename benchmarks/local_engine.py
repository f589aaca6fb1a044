"""Engines in the benchmark's own process, and the command-line options that select model and drafter."""

import argparse
import os
import time
from pathlib import Path
from typing import NamedTuple

import transformers

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, ForcedAcceptance, SpeculationConfig
from wingbeat.runtime.demo import DEMO_FOLDER, demo_pair
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import SamplingParams
from wingbeat.runtime.standard_library import stdlib_root

DEMO_HEADS = ("dspark", "dflash2")
"""Folders of the demo's heads that draft in one pass."""
MAX_MODEL_LEN = 512
"""Tokens of the longest prompt with its answer."""


class Pair(NamedTuple):
    """Checkpoints to measure."""

    model: Path
    drafter: str | Path


class Generation(NamedTuple):
    """Result of generating from prompts to their ends."""

    elapsed_s: float
    token_ids: list[list[int]]
    """Generated tokens by prompt."""
    metrics: SpeculationMetrics
    """Sum over the prompts."""

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all prompts per second."""
        return sum(map(len, self.token_ids)) / self.elapsed_s


def quiet() -> None:
    """Silences the progress bars and notes of libraries."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds `--model`, `--drafter`, `--corpus`, `--quick`, `--output`."""
    parser.add_argument("--model", type=Path, help="folder of the verifier's checkpoint; default: the demo pair")
    parser.add_argument("--drafter", help="folder of an EAGLE head, or ngram; required with --model")
    parser.add_argument(
        "--corpus", type=Path, default=stdlib_root(), help="folder from whose held-out files prompts are cut"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few short requests: checks that the script works, measures nothing"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")


def chosen_pair(args: argparse.Namespace) -> Pair:
    """Checkpoints that the options name. Exits with one line if they are incomplete."""
    if args.model is None:
        demo = demo_pair()
        return Pair(demo.verifier, args.drafter or demo.drafter)
    if args.drafter is None:
        raise SystemExit("--model needs --drafter: the folder of its EAGLE head, or ngram")
    return Pair(args.model, args.drafter)


def add_other_drafters(parser: argparse.ArgumentParser) -> None:
    """Adds `--other`."""
    parser.add_argument(
        "--other",
        action="append",
        default=[],
        metavar="NAME=DRAFTER",
        help="an additional drafter, with its name in the tables; repeatable",
    )


def chosen_drafters(args: argparse.Namespace, pair: Pair) -> dict[str, str | Path]:
    """Drafters by name: the pair's head, the demo's other heads if the pair is the demo's, and those of `--other`.

    Exits with one line if `--other` is malformed.
    """
    drafters: dict[str, str | Path] = {"eagle3" if args.drafter is None else "drafter": pair.drafter}
    if args.model is None:
        folders = {name: DEMO_FOLDER / name for name in DEMO_HEADS}
        drafters |= {name: folder for name, folder in folders.items() if (folder / "config.json").is_file()}
    return drafters | other_drafters(args)


def other_drafters(args: argparse.Namespace) -> dict[str, str]:
    """Drafters of `--other` by name. Exits with one line if one is not NAME=DRAFTER."""
    drafters = {}
    for given in args.other:
        name, _, source = given.partition("=")
        if not (name and source):
            raise SystemExit(f"--other {given}: a name, an equals sign and a drafter are needed")
        drafters[name] = source
    return drafters


def open_llm(
    pair: Pair,
    *,
    max_num_seqs: int,
    threads: int = 1,
    speculation: SpeculationConfig | None = None,
    forced: ForcedAcceptance | None = None,
    dtype: str | None = None,
) -> LLM:
    """Opens an engine on the CPU without a prefix cache, so that every repeat computes its prompts again.

    Args:
        speculation: shape of the trees; None is the application's default on CPUs.
        forced: forced acceptance in place of the drafter's own.
        dtype: as for `LLM`.
    """
    speculation = speculation or SpeculationConfig.default("cpu")
    blocks_per_seq = EngineConfig(max_model_len=MAX_MODEL_LEN, speculation=speculation).max_blocks_per_seq
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=1 + max_num_seqs * blocks_per_seq,
        enable_prefix_caching=False,
        speculation=speculation,
        forced_acceptance=forced,
    )
    return LLM(*pair, config, InProcessChannel, device="cpu", threads=threads, dtype=dtype)


def greedy(max_tokens: int, speculation: bool = True) -> SamplingParams:
    """Parameters for exactly `max_tokens` greedy tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, speculation=speculation)


def sampled(max_tokens: int, temperature: float) -> SamplingParams:
    """Parameters for exactly `max_tokens` tokens sampled with a fixed seed; temperature 0 is greedy."""
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=True)


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams, batch_size: int | None = None) -> Generation:
    """Runs prompts to their ends, all at once or in batches of `batch_size`."""
    token_ids, metrics = [], SpeculationMetrics()
    started = time.perf_counter()
    size = batch_size or len(prompts)
    for start in range(0, len(prompts), size):
        batch = prompts[start : start + size]
        for result in llm.generate(batch, [params] * len(batch)):
            token_ids.append(result.token_ids)
            metrics.add(result.metrics)
    return Generation(time.perf_counter() - started, token_ids, metrics)
