"""What every command that runs a model can be told: which model, which drafter, and how the two are run."""

from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, create_model, field_validator, model_validator

from wingbeat.deployments.options.panel_titles import DRAFTING
from wingbeat.deployments.options.words import with_nothing_by_word
from wingbeat.deployments.parts import hooks, merged
from wingbeat.runtime import parts as runtime_parts
from wingbeat.runtime.config import (
    INT8,
    PROMPT_TOKENS,
    TREE_FIELDS,
    EngineConfig,
    SpeculationConfig,
    default_by_device,
    drawn_tree,
    resolve_dtype,
)
from wingbeat.runtime.config_fields import dtype_name
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import (
    KIND_OF_SETTING,
    KINDS,
    TEXT_DRAFTERS,
    DrafterChoice,
    check_settings,
    parse_drafter,
)
from wingbeat.runtime.folder_kinds import folder_problem
from wingbeat.runtime.hub import HubName, checkpoint_folder
from wingbeat.runtime.parts import runs_engines
from wingbeat.runtime.refusals import REFUSED_TOGETHER, Feature, refuse
from wingbeat.runtime.settings import Settings
from wingbeat.runtime.tensor_files import num_positions, stored_dtype

_ALLOWED = "must be a directory with a config.json, or org/name of the Hugging Face hub"


class ModelFolder(Settings):
    """A model's folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    model: Path | None = Field(
        None,
        description="Folder of a Hugging Face checkpoint, a GGUF file, a name on the hub, org/name[@revision], or the "
        "name of a model that wingbeat fetch has; none takes the demo pair.",
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_by_word(cls, values: Any) -> Any:
        return with_nothing_by_word(cls, values)

    @field_validator("model", mode="before")
    @classmethod
    def _as_it_was_written(cls, value: Any) -> Any:
        # As a path, ./org/name is org/name, which may be of the hub.
        if isinstance(value, str) and value.startswith((".", "~")) and not Path(value).is_dir():
            raise ValueError(f"{folder_problem(value)}; {_ALLOWED}")
        return value

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        """A name of the hub is looked up where it is used."""
        if self.model is None or HubName.parse(self.model) is not None:
            return self
        if (problem := folder_problem(self.model)) is not None:
            raise ValueError(f"model is {str(self.model)!r}: {problem}; {_ALLOWED}")
        return self

    def model_dir(self, with_weights: bool = True) -> Path:
        """The verifier's checkpoint, fetched from the hub if need be.

        Args:
            with_weights: False where configuration and tokenizer will do.

        Raises:
            FileNotFoundError: none is given and this installation comes without the demo pair.
            HubError: it has a name of the hub and is not to be had.
        """
        return demo_pair().verifier if self.model is None else checkpoint_folder(self.model, with_weights)


class LoadOptions(ModelFolder):
    """A model's folder, and where and how its weights are held."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] | None = Field(
        None,
        description="Of weights and KV; by default float16 or else bfloat16 on GPUs, float32 on CPUs. 'auto' is the "
        "same, but for a checkpoint in bfloat16 on a CPU that has units for it: tried both ways, the faster is taken. "
        "'int8' on CPUs: float32, but linear layers' weights are rounded to eight bits with a scale per channel.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="'auto' is cuda where there is one; of a server whose shares of GPUs are given, where they are "
        "above 0. 'cpu' takes no GPU.",
    )
    threads: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="CPU threads; of a server, the verifier's and the drafter's each. 0 tries at start-up how many of "
        "this machine's cores their passes are worth; so does the default, where one pair is served.",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _by_torchs_name(cls, value: Any) -> Any:
        return value if value is None else dtype_name(str(value))

    def resolved_device(self) -> str:
        """`cpu` or `cuda`; imports torch to know whether there is one."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def resolved_dtype(self, checkpoint: Path | None = None) -> str:
        """Name of torch's dtype, before anything is tried.

        Args:
            checkpoint: the folder whose weights are meant; None is the verifier's.
        """
        named = self.dtype not in (None, "auto")
        if named or self.resolved_device() == "cpu":
            return resolve_dtype(self.dtype, "cpu", None)
        stored = stored_dtype(checkpoint or self.model_dir(with_weights=False))
        return resolve_dtype(self.dtype, self.resolved_device(), stored)

    def rounds_weights(self) -> bool:
        """Whether the weights of linear layers are rounded to eight bits, beside `resolved_dtype`."""
        return self.dtype == INT8

    def shown_dtype(self, resolved: str) -> str:
        """A dtype for people: `resolved`, and how the weights are held where that differs."""
        return f"{INT8} weights, {resolved} otherwise" if self.rounds_weights() else resolved

    def tries_bfloat16(self) -> bool:
        """Whether a CPU's own figures decide between float32 and bfloat16."""
        if self.dtype != "auto" or self.resolved_device() != "cpu":
            return False
        return stored_dtype(self.model_dir(with_weights=False)) == "bfloat16"


def _of_drafters() -> dict[str, Any]:
    """Fields of the settings that kinds of drafters have."""
    panel: dict[str, Any] = {"panel": DRAFTING}
    return {
        one.name: (
            one.number | None,
            Field(None, ge=one.least, le=one.most, description=one.description, json_schema_extra=panel),
        )
        for kind in KINDS.values()
        for one in kind.settings
    }


ModelSettings = create_model(
    "ModelSettings",
    __base__=LoadOptions,
    **merged("model_settings"),
    **_of_drafters(),
)
"""Settings of a model, those of parts and of kinds of drafters among them."""


class ModelOptions(ModelSettings):
    """A model and its drafter.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    drafter: str = Field(
        "auto",
        description="Folder, or name on the hub, of a draft head (EAGLE, DFlash and others) or of a draft model, 'mtp' "
        "(the model's own multi-token prediction), 'suffix' or 'ngram' (earlier text continued), 'none' (plain "
        "decoding), the import path of a class, or 'auto': the demo pair's head for the demo model, 'mtp' where the "
        "model's checkpoint has it, 'ngram' for any other.",
    )
    allow_bad_drafter: bool = Field(
        False, description="Use a drafter that fails its self-test at the start, with a warning."
    )
    drafter_weights: Literal["auto", "fp8"] = Field(
        "auto",
        description="Of an EAGLE head: 'fp8' rounds them to eight bits with a scale per channel, which a GPU reads in "
        "half the time; 'auto' has the dtype of the model.",
    )
    draft_steps: int | None = Field(
        None, description=f"Most levels of a draft tree below its root; {default_by_device('draft_steps')}."
    )
    draft_top_k: int | tuple[tuple[int, ...], ...] | None = Field(
        None,
        description=f"Children per expanded node, 1 drafts a chain; {default_by_device('draft_top_k')}. Or a tree "
        "of one shape, as JSON: the paths of its nodes as ranks among their parents' candidates, such as "
        "[[0], [1], [0, 0]]; draft_steps and verify_tree_size then follow from it.",
    )
    verify_tree_size: int | None = Field(
        None,
        description="Most tree nodes verified per sequence and round, root included; "
        f"{default_by_device('verify_tree_size')}.",
    )
    adaptive: bool | None = Field(
        None,
        description="Let measured costs and tracked acceptance decide each round's depth and nodes, or that nothing is "
        "drafted; by default true.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Of the verifier's KV: 'fp8' rounds keys and values to float8_e4m3fn, which halves the memory of "
        "bfloat16's and changes texts, with and without speculation alike; 'auto' has the dtype of the model.",
    )

    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="On GPUs: 'auto' compiles Wingbeat's own and takes torch's operations where one of them does not "
        "compute the same on this device; 'torch' compiles none, which is slower.",
    )
    deterministic: bool = Field(
        False,
        description="In any dtype: a request gets the same tokens, bit for bit, with and without speculation, alone "
        "and in any batch. Layers run by own kernels alone, so that many rows of large models take longer in bfloat16, "
        "on CPUs up to twice as long, and models with other layers are refused.",
    )
    engine_dir: Path | None = Field(
        None,
        description="What wingbeat build-engine made of the model and its drafter: TensorRT engines, or graphs that a "
        "CPU runs by ONNX Runtime, in the place of weights that torch runs.",
    )

    @field_validator("draft_top_k", mode="before")
    @classmethod
    def _tree_of_json(cls, value: Any) -> Any:
        if value is None or isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdecimal()):
            return value
        return drawn_tree(value).paths

    @model_validator(mode="after")
    def _check_engine_dir(self) -> Self:
        if self.engine_dir is not None and not runs_engines():
            raise ValueError("engine_dir is given: nothing that is installed runs engines")
        if self.engine_dir is not None and not (self.engine_dir / "base_config.json").is_file():
            what = "no base_config.json there" if self.engine_dir.is_dir() else "there is no such folder"
            raise ValueError(f"engine_dir is {str(self.engine_dir)!r}: {what}")
        return self

    @model_validator(mode="after")
    def _check_drafter(self) -> Self:
        check_settings(self.choice(), self.drafter_settings())
        SpeculationConfig.default("cpu", **self._tree())
        return self

    @model_validator(mode="after")
    def _refuse_what_does_not_go_together(self) -> Self:
        rows = chain(*runtime_parts.hooks("refusals"), REFUSED_TOGETHER, *hooks("refusals"))
        refuse({feature: said for feature, (is_asked, said) in self.asked().items() if is_asked}, rows)
        return self

    def asked(self) -> dict[str, tuple[bool, str]]:
        """Features that do not go with everything: whether each is asked for, and how."""
        return merged("model_asked", self) | {
            Feature.DETERMINISTIC: (self.deterministic, "deterministic is True"),
            Feature.FP8_KV: (self.kv_cache_dtype == "fp8", "kv_cache_dtype is fp8"),
            Feature.INT8: (self.rounds_weights(), "dtype is int8"),
            Feature.ENGINE_DIR: (self.engine_dir is not None, "engine_dir is given"),
            Feature.DRAWN_TREE: (isinstance(self.draft_top_k, tuple), "draft_top_k is a tree"),
            Feature.TEXT_DRAFTER: (self.choice().kind in TEXT_DRAFTERS, f"drafter is {self.choice().label}"),
        }

    def num_threads(self) -> int:
        """On CPUs; 0 where start-up tries how many pay."""
        return self.threads or 0

    def drafter_settings(self) -> dict[str, Any]:
        """Settings of the drafter's kind that are given."""
        found = {name: getattr(self, name) for name in KIND_OF_SETTING}
        return {name: value for name, value in found.items() if value is not None}

    def choice(self) -> DrafterChoice:
        """The drafter, `auto` resolved."""
        return parse_drafter(self.drafter, self.model)

    def _positions(self) -> int | None:
        """Positions of the model as its config.json has them; None where it leaves that to the class."""
        return num_positions(self.model_dir(with_weights=False))

    def _engine_config(self, **given: Any) -> EngineConfig:
        """Limits of one engine: the fields that bear a limit's name, and those `given` in their place.

        Raises:
            ValueError: a limit is out of range; names field and value.
        """
        # A command's own `speculation` is something else: whether its requests speculate.
        names = (field.name for field in fields(EngineConfig) if field.name != "speculation")
        own = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        device = self.resolved_device()
        if own.get("max_num_batched_tokens") is None:
            own["max_num_batched_tokens"] = PROMPT_TOKENS[device]
            own["lower_max_num_batched_tokens"] = device == "cuda"
        return EngineConfig(**own | given, speculation=SpeculationConfig.default(device, **self._tree()))

    def _tree(self) -> dict[str, Any]:
        return {name: value for name in TREE_FIELDS if (value := getattr(self, name)) is not None}


def checkpoint_here(model: Path | None) -> Path | None:
    """The folder of a verifier where it is a folder already; None for a name of the hub, and without the demo pair."""
    if model is not None:
        return None if HubName.parse(model) is not None else checkpoint_folder(model)
    try:
        return demo_pair().verifier
    except FileNotFoundError:
        return None
