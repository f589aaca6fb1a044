"""`wingbeat bench`: the same prompts with and without speculation, interleaved in one run, in process."""

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from pydantic import Field, model_validator

from wingbeat.deployments.cli.options import UserError
from wingbeat.deployments.local.engine import LocalConfig, OpenEngine
from wingbeat.deployments.options.benchmark_options import BenchmarkOptions
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import SamplingParams

if TYPE_CHECKING:
    from rich.table import Table

    from wingbeat.runtime.llm import LLM

PROMPTS = (
    "def read_config(path):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    'def parse_header(line):\n    """Split a header line into name and value."""\n    ',
    "class ServerError(Exception):\n    ",
    "def test_round_trip(self):\n        ",
    "for name in sorted(os.listdir(path)):\n    ",
    "    def __repr__(self):\n        return ",
)


class BenchConfig(BenchmarkOptions, LocalConfig):
    """Options of `wingbeat bench`."""

    prompts: Path | None = Field(None, description="Text file with one prompt per line; by default a few of code.")
    max_tokens: int = Field(128, ge=2, description="Tokens per prompt; the end of text is ignored.")
    batch_size: int = Field(1, ge=1, description="Prompts that run at once.")
    repeat: int = Field(3, ge=1, description="Passes over the prompts per mode; medians are shown.")
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the most likely token.")
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="Of the sampling noise.")

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if self.prompts is not None and not self.prompts.is_file():
            raise ValueError(f"--prompts {self.prompts}: no such file; give a text file with one prompt per line")
        return self

    def texts(self) -> list[str]:
        """The prompts."""
        if self.prompts is None:
            return list(PROMPTS)
        lines = self.prompts.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.strip()]


class Pass(NamedTuple):
    """A pass over all prompts in one mode."""

    elapsed_s: float
    token_ids: list[list[int]]
    metrics: SpeculationMetrics


class Report(NamedTuple):
    """Medians over the passes."""

    num_prompts: int
    num_tokens: int
    """Per pass."""
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    same_tokens: bool
    """Every pass of both modes produced the same tokens."""
    metrics: SpeculationMetrics

    @property
    def speedup(self) -> float:
        """Speculative over plain."""
        return self.speculative_tokens_per_s / self.plain_tokens_per_s

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "plain_tokens_per_s": round(self.plain_tokens_per_s, 2),
            "speculative_tokens_per_s": round(self.speculative_tokens_per_s, 2),
            "speedup": round(self.speedup, 3),
            "same_tokens": self.same_tokens,
            "metrics": {"speculative_decoding": self.metrics.as_dict()},
        }


def bench_command(config: BenchConfig, as_json: bool, open_engine: OpenEngine) -> None:
    """Run and print the comparison; raises UserError where the engine or the prompts cannot be used."""
    llm = open_engine(config, config.batch_size)
    prompts = _encode(llm, config)
    report = run_bench(llm, config, prompts)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        from rich.console import Console

        console = Console()
        for table in tables(report, config):
            console.print(table)


def run_bench(llm: "LLM", config: BenchConfig, prompts: list[list[int]]) -> Report:
    """Both modes in turn, so that a drift of the machine's speed meets both alike."""
    for speculation in (False, True):
        # The first pass pays for caches, lazy set-up and the prefix cache; it is not counted.
        _run_pass(llm, config, prompts, speculation)
    passes: dict[bool, list[Pass]] = {False: [], True: []}
    for _ in range(config.repeat):
        for speculation, done in passes.items():
            done.append(_run_pass(llm, config, prompts, speculation))
    first = passes[False][0]
    num_tokens = sum(map(len, first.token_ids))
    elapsed_s = {mode: statistics.median(one.elapsed_s for one in done) for mode, done in passes.items()}
    return Report(
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        plain_tokens_per_s=num_tokens / elapsed_s[False],
        speculative_tokens_per_s=num_tokens / elapsed_s[True],
        same_tokens=all(one.token_ids == first.token_ids for done in passes.values() for one in done),
        metrics=passes[True][-1].metrics,
    )


def tables(report: Report, config: BenchConfig) -> "list[Table]":
    """Speed of both modes, and acceptance per depth of the tree."""
    from rich.table import Table

    length = f"{report.metrics.acceptance_length:.2f}"
    same = "same tokens in both" if report.same_tokens else "[red]tokens differ[/red]"
    if config.forced_acceptance is not None:
        same = f"acceptance forced to {config.forced_acceptance}: the text is not the model's"
    title = f"{report.num_prompts} prompts x {config.max_tokens} tokens, batch {config.batch_size}, {same}"
    speed = Table("", "tokens/s", "ms/token", "acceptance length", "ratio", title=title)
    plain, speculative = report.plain_tokens_per_s, report.speculative_tokens_per_s
    speed.add_row("plain", f"{plain:.1f}", f"{1000 / plain:.2f}", "-", "1.00")
    speed.add_row("speculative", f"{speculative:.1f}", f"{1000 / speculative:.2f}", length, f"{report.speedup:.2f}")
    depth = Table("depth", "accepted if reached", title="Acceptance per position")
    for position, rate in enumerate(report.metrics.acceptance_rate_per_pos()):
        depth.add_row(str(position + 1), f"{rate:.3f}")
    return [speed, depth]


def _run_pass(llm: "LLM", config: BenchConfig, prompts: list[list[int]], speculation: bool) -> Pass:
    params = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        ignore_eos=True,
        speculation=speculation,
    )
    token_ids, metrics = [], SpeculationMetrics()
    started = time.perf_counter()
    for start in range(0, len(prompts), config.batch_size):
        batch = prompts[start : start + config.batch_size]
        for result in llm.generate(batch, [params] * len(batch)):
            token_ids.append(result.token_ids)
            metrics.add(result.metrics)
    return Pass(time.perf_counter() - started, token_ids, metrics)


def _encode(llm: "LLM", config: BenchConfig) -> list[list[int]]:
    if llm.tokenizer is None:
        raise UserError("the model has no tokenizer: bench needs text prompts")
    prompts = [llm.tokenizer.encode(text) for text in config.texts()]
    if not prompts:
        raise UserError(f"--prompts {config.prompts}: the file holds no prompt")
    limit = llm.engine.config.max_model_len
    longest = max(map(len, prompts))
    if longest + config.max_tokens > limit:
        message = f"{longest} prompt tokens and --max-tokens {config.max_tokens} exceed the context of {limit}"
        raise UserError(f"{message}: lower --max-tokens")
    return prompts
