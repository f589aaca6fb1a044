"""Options of `wingbeat bench`: which prompts, how many at once, and with which drafter."""

from dataclasses import replace
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from wingbeat.deployments.bench.questions import SPECBENCH, evenly
from wingbeat.deployments.local.engine import LocalConfig
from wingbeat.deployments.options.benchmark_options import BenchmarkOptions
from wingbeat.runtime.config import EngineConfig

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
    dataset: str | None = Field(
        None,
        description="Questions in the place of prompts, each asked once per mode, with figures by category: "
        f"'{SPECBENCH}' (80 questions of Spec-Bench that come with Wingbeat), or a JSONL file whose lines hold "
        "'turns', a list of texts, or 'prompt', and 'category'.",
    )
    num_prompts: int | None = Field(
        None, ge=1, description="Prompts or questions to take, evenly spread over the file; by default all."
    )
    max_tokens: int = Field(
        128, ge=2, description="Tokens per prompt; the end of text is ignored, but for answers to questions."
    )
    batch_size: int = Field(1, ge=1, description="Prompts that run at once.")
    repeat: int = Field(3, ge=1, description="Passes over the prompts per mode; medians are shown.")
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the most likely token.")
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="Of the sampling noise.")

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if self.prompts is not None and not self.prompts.is_file():
            raise ValueError(f"--prompts {self.prompts}: no such file; give a text file with one prompt per line")
        if self.dataset is None:
            return self
        if self.dataset != SPECBENCH and not Path(self.dataset).is_file():
            raise ValueError(f"--dataset {self.dataset}: no such file; give '{SPECBENCH}' or a JSONL file")
        for name in {"prompts", "repeat"} & self.model_fields_set:
            raise ValueError(
                f"--{name} {getattr(self, name)}: does not go with --dataset, which is asked once per mode"
            )
        return self

    def texts(self) -> list[str]:
        """The prompts."""
        texts = PROMPTS if self.prompts is None else self.prompts.read_text(encoding="utf-8").splitlines()
        return evenly([text for text in texts if text.strip()], self.num_prompts)


class AskedOnce(BenchConfig):
    """Options of a run that asks nothing twice: drafts of copied text find no answer that was given before."""

    def engine_config(self, max_num_seqs: int) -> EngineConfig:
        """Limits without the prefix cache, by which the second mode would save the first one's prompts."""
        return replace(super().engine_config(max_num_seqs), enable_prefix_caching=False)
