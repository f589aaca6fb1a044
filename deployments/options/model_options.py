"""Settings of every command that runs a model: the model, the drafter, and how both are loaded and run."""

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
    asks_for_graphs,
    default_by_device,
    drawn_tree,
    dtype_name,
    resolve_dtype,
)
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
from wingbeat.runtime.refusals import REFUSED_TOGETHER, Feature, refuse
from wingbeat.runtime.settings import Settings
from wingbeat.runtime.tensor_files import num_positions, stored_dtype

_ALLOWED = "must be a directory with a config.json, or org/name of the Hugging Face hub"


class ModelFolder(Settings):
    """Setting that names the model."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    model: Path | None = Field(
        None,
        description="Folder of a Hugging Face checkpoint, a GGUF file, a name on the Hugging Face hub "
        "(org/name[@revision]), or the short name of a model that wingbeat fetch can download. By default the demo "
        "pair's verifier.",
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_by_word(cls, values: Any) -> Any:
        return with_nothing_by_word(cls, values)

    @field_validator("model", mode="before")
    @classmethod
    def _as_it_was_written(cls, value: Any) -> Any:
        # The value is checked here as text, because Path("./org/name") drops the "./" and would then look like a name
        # on the hub.
        if isinstance(value, str) and value.startswith((".", "~")) and not Path(value).is_dir():
            raise ValueError(f"{folder_problem(value)}; {_ALLOWED}")
        return value

    @model_validator(mode="after")
    def _check_model(self) -> Self:
        """Checks that a local folder contains a model. A name on the hub is not checked here, because it is resolved
        only when the model is loaded.
        """
        if self.model is None or HubName.parse(self.model) is not None:
            return self
        if (problem := folder_problem(self.model)) is not None:
            raise ValueError(f"model is {str(self.model)!r}: {problem}; {_ALLOWED}")
        return self

    def model_dir(self, with_weights: bool = True) -> Path:
        """Returns the folder of the verifier's checkpoint, fetched from the hub if necessary.

        Args:
            with_weights: whether weights are fetched too; with False, only the configuration and the tokenizer are
                fetched.

        Raises:
            FileNotFoundError: no model is given and this installation has no demo pair.
            HubError: the model is named on the hub and cannot be fetched.
        """
        return demo_pair().verifier if self.model is None else checkpoint_folder(self.model, with_weights)


class LoadOptions(ModelFolder):
    """The model, and the device and dtype of its weights."""

    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] | None = Field(
        None,
        description="Dtype of weights and KV cache. By default float32 on CPUs; on GPUs float16 if config.json "
        "names it, and bfloat16 otherwise. 'auto' differs from the default only for a bfloat16 checkpoint on a CPU "
        "with bfloat16 units (AVX512-BF16, AMX): the engine times both dtypes at startup, uses bfloat16 if rounds "
        "are 10 % shorter, and keeps the choice in the cache folder. With bfloat16 texts have bfloat16's rounding, "
        "so name a dtype if replicas run on different kinds of CPU. 'int8', on CPUs only, is float32 with the "
        "weights of linear layers rounded to eight bits, with one scale per output channel. Reading these weights "
        "takes half as long as in bfloat16, and the rounding changes texts.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="'auto' uses a GPU if there is one; a server whose GPU shares are given uses a GPU only if the "
        "verifier's share is above 0. 'cpu' uses no GPU.",
    )
    threads: int | None = Field(
        None,
        ge=0,
        le=1024,
        description="CPU threads of the verifier and of the drafter. With 0 the engine measures at startup with "
        "how many threads the verifier, and a head that drafts with the CPU kernels, are fastest; other drafters "
        "get 1 thread. The default is 0 for a single pair, and 1 with several replicas, models, ranks or shared "
        "drafters. With 1, verifier and drafter share one core if Wingbeat can reserve a core for them.",
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _by_torchs_name(cls, value: Any) -> Any:
        return value if value is None else dtype_name(str(value))

    def resolved_device(self) -> str:
        """Returns `cpu` or `cuda`; for the setting `auto`, imports torch to check for a GPU."""
        if self.device != "auto":
            return self.device
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def resolved_dtype(self, checkpoint: Path | None = None) -> str:
        """Returns the name of the torch dtype that follows from settings and checkpoint, without timing any dtype.

        Args:
            checkpoint: folder of the weights; with None, the verifier's folder is used.
        """
        named = self.dtype not in (None, "auto")
        if named or self.resolved_device() == "cpu":
            return resolve_dtype(self.dtype, "cpu", None)
        stored = stored_dtype(checkpoint or self.model_dir(with_weights=False))
        return resolve_dtype(self.dtype, self.resolved_device(), stored)

    def rounds_weights(self) -> bool:
        """Whether the weights of linear layers are rounded to eight bits; `resolved_dtype` is the dtype of all other
        weights.
        """
        return self.dtype == INT8

    def shown_dtype(self, resolved: str) -> str:
        """Returns the text about the dtype for log lines: `resolved`, and also int8 if the weights of linear layers are
        rounded to int8.
        """
        return f"{INT8} weights, {resolved} otherwise" if self.rounds_weights() else resolved

    def shown_load(self) -> str:
        """Returns the dtype and the device of the model, for log lines."""
        others = " or bfloat16, whichever is faster" if self.tries_bfloat16() else ""
        return f"{self.shown_dtype(self.resolved_dtype())}{others} on {self.resolved_device()}"

    def tries_bfloat16(self) -> bool:
        """Whether the dtype, float32 or bfloat16, is chosen by timing both on this CPU."""
        if self.dtype != "auto" or self.resolved_device() != "cpu":
            return False
        return stored_dtype(self.model_dir(with_weights=False)) == "bfloat16"


def _of_drafters() -> dict[str, Any]:
    """Returns pydantic fields for the settings that kinds of drafters declare."""
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
"""Settings of a model, including settings that installed parts and kinds of drafters add."""


class ModelOptions(ModelSettings):
    """Settings of a model and its drafter.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type or out of range.
    """

    drafter: str = Field(
        "auto",
        description="Folder, GGUF file or hub name of a draft head (EAGLE, DFlash and others) or of a draft model; "
        "'mtp' (the model's own multi-token prediction), 'suffix' or 'ngram' (continues earlier text), "
        "'none' (plain decoding), or the import path of a class. 'auto' is the demo's head for the demo "
        "model, the head that comes with a short name, otherwise 'mtp' if the checkpoint has it, "
        "otherwise 'ngram'.",
    )
    allow_bad_drafter: bool = Field(
        False,
        description="Serve a drafter that fails its self-test at the start, with a warning. By default the start "
        "fails with such a drafter.",
    )
    drafter_weights: Literal["auto", "fp8"] = Field(
        "auto",
        description="Storage of an EAGLE head's weights: 'fp8' rounds them to eight bits with one scale per output "
        "channel, so a GPU reads them in half the time; 'auto' keeps the model's dtype.",
    )
    draft_steps: int | None = Field(
        None, description=f"Maximum levels of a draft tree below its root; {default_by_device('draft_steps')}."
    )
    draft_top_k: int | tuple[tuple[int, ...], ...] | None = Field(
        None,
        description="Children per expanded node of a draft tree; 1 drafts a chain; "
        f"{default_by_device('draft_top_k')}. Or a fixed tree as JSON, such as [[0], [1], [0, 0]]: a list with a "
        "path for each node, which gives the rank of each token on the way from the root among the candidates of "
        "its parent. A fixed tree determines draft_steps and verify_tree_size.",
    )
    verify_tree_size: int | None = Field(
        None,
        description="Maximum tree nodes verified per sequence and round, root included; "
        f"{default_by_device('verify_tree_size')}.",
    )
    adaptive: bool | None = Field(
        None,
        description="Choose the depth and nodes of each round's draft tree, or plain decoding, from measured costs "
        "and tracked acceptance. By default true; false drafts the full tree in each round.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Dtype of the verifier's KV cache: 'auto' is the model's dtype; 'fp8' rounds keys and values "
        "to float8_e4m3fn, so that the same memory holds twice as many tokens as in bfloat16 and four times as "
        "many as in float32. fp8 changes texts, in the same way with and without speculation, is slower on CPUs, "
        "and is refused together with tensor_parallel_size above 1 or engine_dir.",
    )

    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="On GPUs: 'auto' compiles Wingbeat's kernels and compares each with torch on the device at "
        "startup; torch's operations replace a kernel that does not compile or that differs, with a warning. "
        "'torch' uses torch's operations only, which is slower.",
    )
    # The literal is the first member of the union, because the help on the command line shows only the values of the
    # first member.
    cuda_graphs: Literal["full", "decode_only", "none"] | bool | None = Field(
        None,
        description="Replay rounds, and the passes of drafters with weights, as CUDA graphs: 'full' also captures "
        "rounds with prompt chunks, 'decode_only' only rounds of decodes, 'none' runs everything eagerly. By default "
        "full on GPUs; true is full and false is none.",
    )
    deterministic: bool = Field(
        False,
        description="Give each request the same tokens bit for bit, in any dtype, with and without speculation, "
        "alone and in any batch. Layers then run only in Wingbeat's own kernels, so models with other layers are "
        "refused. Passes of many rows through large models in bfloat16 take longer, on CPUs up to twice as long.",
    )
    engine_dir: Path | None = Field(
        None,
        description="Folder made by wingbeat build-engine from the model and its drafter: its TensorRT engines, or "
        "graphs that a CPU runs with ONNX Runtime, replace the weights that torch runs.",
    )

    @field_validator("draft_top_k", mode="before")
    @classmethod
    def _tree_of_json(cls, value: Any) -> Any:
        if value is None or isinstance(value, int) or (isinstance(value, str) and value.lstrip("-").isdecimal()):
            return value
        return drawn_tree(value).paths

    @model_validator(mode="after")
    def _check_engine_dir(self) -> Self:
        if self.engine_dir is not None and not runtime_parts.hooks("open_drafter"):
            raise ValueError("engine_dir is given, but no installed part can run engines: leave it out")
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
        """Returns a pair for each feature that can conflict with another feature: whether the settings use the feature,
        and a phrase that names the setting in error messages.
        """
        return merged("model_asked", self) | {
            Feature.CUDA_GRAPHS: (asks_for_graphs(self.cuda_graphs), f"cuda_graphs is {self.cuda_graphs}"),
            Feature.DETERMINISTIC: (self.deterministic, "deterministic is True"),
            Feature.FP8_KV: (self.kv_cache_dtype == "fp8", "kv_cache_dtype is fp8"),
            Feature.INT8: (self.rounds_weights(), "dtype is int8"),
            Feature.ENGINE_DIR: (self.engine_dir is not None, "engine_dir is given"),
            Feature.DRAWN_TREE: (isinstance(self.draft_top_k, tuple), "draft_top_k is a tree"),
            Feature.TEXT_DRAFTER: (self.choice().kind in TEXT_DRAFTERS, f"drafter is {self.choice().label}"),
        }

    def num_threads(self) -> int:
        """Returns the number of CPU threads; 0 if a measurement at the start chooses the number."""
        return self.threads or 0

    def drafter_settings(self) -> dict[str, Any]:
        """Returns the settings of the drafter's kind that the user has given."""
        found = {name: getattr(self, name) for name in KIND_OF_SETTING}
        return {name: value for name, value in found.items() if value is not None}

    def choice(self) -> DrafterChoice:
        """Returns the drafter, with `auto` resolved."""
        return parse_drafter(self.drafter, self.model)

    def _positions(self) -> int | None:
        """Returns the model's number of positions from config.json.

        None if config.json does not state the number, so that the model class determines it.
        """
        return num_positions(self.model_dir(with_weights=False))

    def _engine_config(self, **given: Any) -> EngineConfig:
        """Builds the limits of one engine from the settings of the same names; values in `given` replace the settings.

        Raises:
            ValueError: a limit is out of range; the message names field and value.
        """
        # The field `speculation` of a command is not copied: it states whether the command's requests speculate, while
        # EngineConfig's field is a `SpeculationConfig`.
        names = (field.name for field in fields(EngineConfig) if field.name != "speculation")
        own = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        device = self.resolved_device()
        if own.get("max_num_batched_tokens") is None:
            own["max_num_batched_tokens"] = PROMPT_TOKENS[device]
            own["lower_max_num_batched_tokens"] = device == "cuda"
        own |= merged("model_limits", self)
        return EngineConfig(**own | given, speculation=SpeculationConfig.default(device, **self._tree()))

    def _tree(self) -> dict[str, Any]:
        return {name: value for name in TREE_FIELDS if (value := getattr(self, name)) is not None}
