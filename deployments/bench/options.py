"""Options of `wingbeat bench`: prompts, load, and drafters."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from wingbeat.deployments.bench.golden import golden_length, golden_settings
from wingbeat.deployments.bench.questions import SPECBENCH, evenly
from wingbeat.deployments.cli.options import UserError, build_config
from wingbeat.deployments.local.engine import LocalConfig
from wingbeat.deployments.options.benchmark_options import BenchmarkOptions
from wingbeat.deployments.options.panel_titles import MEASURING
from wingbeat.deployments.parts import first_result
from wingbeat.runtime.config import EngineConfig
from wingbeat.runtime.drafters.choice import KIND_OF_SETTING, DrafterChoice, parse_drafter

PROMPTS = (
    "def read_config(path):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "import os\nimport sys\n\n\ndef main(argv=None):\n    ",
    'def parse_header(line):\n    """Split a header line into name and value."""\n    ',
    "class ServerError(Exception):\n    ",
    "def test_round_trip(self):\n        ",
    "for name in sorted(os.listdir(path)):\n    ",
    "    def __repr__(self):\n        return ",
    "with open(path) as file:\n    ",
    "try:\n    import json\nexcept ImportError:\n    ",
    "@property\n    def size(self):\n        ",
    "if __name__ == ",
    "class Reader(Base):\n    def read(self, size=-1):\n        ",
    "def _format(self, value, width):\n    ",
    "while True:\n    line = ",
    "from collections import OrderedDict\n\n\ndef group(items):\n    ",
)
"""Beginnings of Python code, as many as the largest of `LOADS`; the demo pair continues Python code."""

LOADS = (1, 4, 16)


class BenchConfig(BenchmarkOptions, LocalConfig):
    """Options of `wingbeat bench`."""

    measures = True

    drafter: tuple[str, ...] = Field(
        ("auto",),
        description=f"{LocalConfig.model_fields['drafter'].description} Repeatable: several are compared.",
        json_schema_extra={"repeatable": True},
    )
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
    batch_size: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (1,), min_length=1, description="Prompts that run at once; where drafters are compared, 1,4,16 unless given."
    )
    price_per_hour: float | None = Field(
        None, gt=0, description="Dollars per hour of the machine: a comparison shows dollars per million tokens."
    )
    repeat: int = Field(3, ge=1, description="Passes over the prompts per mode; medians are shown.")
    temperature: float = Field(0.0, ge=0, le=100, description="0 takes the most likely token.")
    golden: str | None = Field(
        None,
        description="Force a published acceptance length, by the name of its model: 'gpt-oss-120b', 'minimax-m3', "
        "'deepseek-v4-pro', 'qwen3.8-27b' and others; draft_steps says how many tokens are drafted. Weights of the "
        "right shape will do: the text is not the model's.",
        json_schema_extra={"panel": MEASURING},
    )
    speculative_config: str | None = Field(
        None,
        description="vLLM's, as JSON: drafter, drafted tokens, a synthetic acceptance length or rates.",
        json_schema_extra={"panel": MEASURING},
    )
    seed: int = Field(0, ge=-(2**63), lt=2**63, description="Of the sampling noise.")

    @model_validator(mode="before")
    @classmethod
    def _settings_of_others(cls, given: Any) -> Any:
        """Replace golden and speculative_config by the settings that they stand for; raise ValueError if other given
        settings contradict the replacements.
        """
        found = dict(given)
        for name, read in (("golden", _golden), ("speculative_config", _of_vllm)):
            if given.get(name) is None:
                continue
            for setting, value in read(given[name], found).items():
                there = found.get(setting)
                # compared as text, because values from the command line are text
                if there is not None and str(there) != str(value):
                    raise ValueError(f"{name} is {given[name]} and {setting} is {there}: leave one out")
                found[setting] = value
        return found

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if self.prompts is not None and not self.prompts.is_file():
            raise ValueError(f"--prompts {self.prompts}: no such file; give a text file with one prompt per line")
        if self.dataset not in (None, SPECBENCH) and not Path(self.dataset).is_file():
            raise ValueError(f"--dataset {self.dataset}: no such file; give '{SPECBENCH}' or a JSONL file")
        refused = {"prompts", "repeat"} if self.dataset is not None else {"repeat"} if self.compares() else set()
        for name in refused & self.model_fields_set:
            raise ValueError(
                f"--{name} {getattr(self, name)}: not with a dataset or a comparison, whose prompts run once"
            )
        return self

    def compares(self) -> bool:
        """Whether several drafters or loads are compared, each in a separate process."""
        return len(self.drafter) > 1 or len(self.batch_size) > 1 or self.price_per_hour is not None

    def choice(self) -> DrafterChoice:
        """Return the first drafter, with `auto` resolved."""
        return parse_drafter(self.drafter[0], self.model)

    def alone(self) -> "list[AskedOnce]":
        """Return the options of one run per load and drafter. If the options name no prompts, a named model answers
        Spec-Bench, and the demo pair continues the beginnings of code.

        Raises:
            UserError: a drafter does not suit the other options.
        """
        # golden and speculative_config are left out, because the validator has already replaced them by other settings.
        others = self.model_dump(exclude_unset=True, exclude={"golden", "speculative_config"})
        given = {"dataset": None if self.prompts or self.model is None else SPECBENCH} | others
        loads = self.batch_size if "batch_size" in self.model_fields_set or not self.compares() else LOADS
        pairs = [(load, drafter) for load in loads for drafter in self.drafter]
        runs = [
            self._told(drafter, given) | {"batch_size": (load,), "drafter": (drafter,), "price_per_hour": None}
            for load, drafter in pairs
        ]
        return [build_config(AskedOnce, one) for one in runs]

    def drafter_settings(self) -> dict[str, Any]:
        """Return the settings of the drafter; empty if several drafters are compared, because each run then has its own
        settings.
        """
        return super().drafter_settings() if len(self.drafter) == 1 else {}

    def _told(self, drafter: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options for one of several drafters, without the settings that apply only to other kinds of
        drafters.
        """
        if len(self.drafter) == 1 or not KIND_OF_SETTING.keys() & given.keys():
            return given
        try:
            kind = parse_drafter(drafter, self.model).kind
        except ValueError as error:
            raise UserError(str(error)) from None
        return {name: value for name, value in given.items() if KIND_OF_SETTING.get(name, kind) == kind}

    def texts(self) -> list[str]:
        """Return the texts of the prompts."""
        texts = PROMPTS if self.prompts is None else self.prompts.read_text(encoding="utf-8").splitlines()
        return evenly([text for text in texts if text.strip()], self.num_prompts)


def _golden(name: str, given: dict[str, Any]) -> dict[str, Any]:
    steps = given.get("draft_steps")
    return golden_settings(golden_length(name, None if steps is None else int(steps)))


def _of_vllm(said: str, given: dict[str, Any]) -> dict[str, Any]:
    settings = first_result("speculative_settings", said, given)
    if settings is None:
        raise ValueError("speculative_config is given: this installation lacks the support of vLLM's options")
    return settings | ({"drafter": (settings["drafter"],)} if "drafter" in settings else {})


class AskedOnce(BenchConfig):
    """Options of a run in which no question is repeated, so that drafters that copy text do not find an earlier
    answer.
    """

    def engine_config(self, max_num_seqs: int) -> EngineConfig:
        """Return limits without a prefix cache. With a prefix cache, the mode that runs second would not have to
        prefill the prompts, so the comparison would be unfair.
        """
        return replace(super().engine_config(max_num_seqs), enable_prefix_caching=False)
