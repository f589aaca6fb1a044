"""Sizes and limits of one engine: validated once at the edge, frozen afterwards."""

import os
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from wingbeat.runtime.parts import first, hooks, merged
from wingbeat.runtime.refusals import Feature, refuse

NUM_BINS = 16
"""Bins of drafters' confidence by which acceptance is counted."""


MOST_OF_TREE = {"draft_steps": 256, "draft_top_k": 256, "verify_tree_size": 1024}
MOST_OF_ENGINE = {
    **{"max_num_seqs": 2**20, "max_model_len": 2**31 - 1, "max_num_batched_tokens": 2**30, "block_size": 2**16},
    **{"num_kv_blocks": 2**31 - 1},
}
"""What no machine holds, or what is made one by one: a number beyond is a slip, and would end in no clear error."""


def check_most(config: object, most: dict[str, int]) -> None:
    """Raises ValueError, with field and value, for a number above its limit; None is no number."""
    for name, limit in most.items():
        if (getattr(config, name) or 0) > limit:
            raise ValueError(f"{name} is {getattr(config, name)}: use at most {limit}")


class DrawnTree(Protocol):
    """Shape of trees that a user has drawn."""

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Nodes, each as the ranks of its ancestors and its own among their siblings."""
        ...

    @property
    def depth(self) -> int:
        """Levels below the root."""
        ...

    @property
    def width(self) -> int:
        """Candidates that an expanded node gives, or the most nodes that a level expands if that is more."""
        ...


def drawn_tree(given: Any) -> DrawnTree:
    """Tree of paths of ranks. Raises ValueError for others, and where nothing here drafts them."""
    if (tree := first("drawn_tree", given)) is None:
        raise ValueError(f"is {given!r}: give a number")
    return tree


@dataclass(frozen=True)
class SpeculationConfig:
    """Shape of the token tree drafted for every sequence and round (EAGLE-2 section 4, Edge-LLM's names)."""

    draft_steps: int = 5
    """Levels of the tree below its root."""
    draft_top_k: int = 4
    """Children per expanded node, and nodes expanded per level. 1 drafts a chain."""
    verify_tree_size: int = 16
    """Nodes the verifier checks per sequence and round, the root included."""
    adaptive: bool = False
    """Let measured costs and tracked acceptance decide each round's depth and nodes, within the shape above, or that
    nothing is drafted at all."""
    draft_tree: DrawnTree | None = None
    """Nodes to draft whatever their probabilities: the three numbers follow from it. None drafts the likeliest."""

    @classmethod
    def of_tree(cls, tree: DrawnTree, adaptive: bool = False) -> "SpeculationConfig":
        """Trees of one shape, which `adaptive` cuts to what pays."""
        return cls(tree.depth, tree.width, 1 + len(tree.paths), adaptive, tree)

    @classmethod
    def default(cls, device: str, **given: Any) -> "SpeculationConfig":
        """The shape that suits a device where nothing else is given.

        On a CPU every verified node costs its time: chains, as deep as heads are trained for. A GPU verifies a small
        tree in the time of one token. Either is cut to what pays.

        Args:
            device: "cpu" or "cuda".
            given: fields set by the user.

        Raises:
            ValueError: a field is out of range.
        """
        given = {"adaptive": True} | given
        if isinstance(given.get("draft_top_k"), list | tuple):
            return cls._drawn(**given)
        if device == "cuda":
            return cls(**given)
        fields = {"draft_steps": 7, "draft_top_k": 1} | given
        fields.setdefault("verify_tree_size", max(cls.verify_tree_size, 1 + fields["draft_steps"]))
        return cls(**fields)

    @classmethod
    def _drawn(cls, draft_top_k: Any, adaptive: bool, **others: int) -> "SpeculationConfig":
        if others:
            name, value = next(iter(others.items()))
            raise ValueError(f"{name} is {value} and draft_top_k is a tree, which says that already: leave {name} out")
        return cls.of_tree(drawn_tree(draft_top_k), adaptive)

    def __post_init__(self) -> None:
        for name in ("draft_steps", "draft_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: use at least 1 (drafter 'none' switches drafting off)"
                )
        check_most(self, MOST_OF_TREE)
        if self.verify_tree_size < 2:
            raise ValueError(
                f"verify_tree_size is {self.verify_tree_size}: use at least 2 (the root and one drafted node)"
            )

    @cached_property
    def num_nodes(self) -> int:
        """Nodes a tree really holds, the root included: a full table can be smaller than `verify_tree_size`."""
        k, steps = self.draft_top_k, self.draft_steps
        return min(self.verify_tree_size, 1 + k + (steps - 1) * k * k)

    @cached_property
    def max_path(self) -> int:
        """Most tokens one round can emit: every level accepted, and the bonus token."""
        return min(self.draft_steps, self.num_nodes - 1) + 1


TREE_FIELDS = ("draft_steps", "draft_top_k", "verify_tree_size", "adaptive")
"""What a user may set of a `SpeculationConfig`."""


def default_by_device(name: str) -> str:
    """A field's defaults, for the description of an option."""
    on_cpu, on_gpu = (getattr(SpeculationConfig.default(device), name) for device in ("cpu", "cuda"))
    return f"by default {on_cpu} on CPUs and {on_gpu} on GPUs"


NUM_SEQS = {"cpu": 16, "cuda": 256}
"""Sequences at once where nothing else is set; on a GPU the most, which its memory may lower."""
PROMPT_TOKENS = {"cpu": 512, "cuda": 2048}
"""Prompt tokens computed per round where nothing else is set: a GPU computes so many in the time of a few hundred."""


DTYPES = ("float32", "bfloat16", "float16")
"""Of weights and KV, by torch's names."""
FloatName = Literal["float32", "bfloat16", "float16"]
INT8 = "int8"
"""In the place of a dtype: float32, but for the weights of linear layers, which are rounded to eight bits with a scale
for each output channel."""


def resolve_dtype(name: str | None, device: str, stored: str | None) -> str:
    """The dtype of activations and KV on a device ("cpu" or "cuda"), and of weights but for `INT8`.

    One that is named is returned as it is.

    Args:
        name: None and "auto" leave it to the device.
        stored: what the checkpoint says of its weights; None where it says nothing.

    Raises:
        ValueError: it is named and none of `DTYPES` or `INT8`.
    """
    if name == INT8:
        return "float32"
    if name not in (None, "auto"):
        if name not in DTYPES:
            raise ValueError(f"dtype is {name!r}: use one of auto, {', '.join(DTYPES)}, {INT8}")
        return name
    if device == "cpu":
        return "float32"
    # A card multiplies floats of 16 bits many times as fast as those of 32.
    return stored if stored in ("bfloat16", "float16") else "bfloat16"


KV_CACHE_DTYPES = ("auto", "fp8")
"""Of the verifier's keys and values: that of its weights, or float8_e4m3fn."""
KERNEL_CHOICES = ("auto", "torch")
GRAPH_MODES = ("full", "decode_only", "none")
"""Words of `EngineConfig.cuda_graphs`; true is the first, and false the last."""


BENCHMARK_VARIABLE = "WINGBEAT_BENCHMARK"
"""Environment variable without whose value 1 an engine refuses to write text that the model did not choose."""


@dataclass(frozen=True)
class ForcedAcceptance:
    """Acceptance by decree, for benchmarks: everything is computed, but how much of a tree is accepted is drawn.

    Raises:
        ValueError: a rate is out of range, or there is none; names the field and the value.
    """

    rates: tuple[float, ...]
    """P(a node at depth d + 1 is accepted | its parent is) at [d]; the last one holds for all deeper levels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(float(rate) for rate in self.rates))
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError(f"forced_acceptance.rates is {self.rates}: use at least one rate, each from 0 to 1")

    @classmethod
    def flat(cls, rate: float) -> "ForcedAcceptance":
        """The same rate at every depth."""
        return cls((rate,))

    @classmethod
    def length(cls, num_tokens: float) -> "ForcedAcceptance":
        """`num_tokens` tokens per verified tree on average, the bonus token included, and never a whole one off.

        Raises:
            ValueError: `num_tokens` is below 1, which the bonus token makes impossible.
        """
        if num_tokens < 1.0:
            raise ValueError(f"forced acceptance length is {num_tokens}: use at least 1, the bonus token")
        certain = int(num_tokens - 1.0)
        return cls((*[1.0] * certain, num_tokens - 1.0 - certain, 0.0))

    def __str__(self) -> str:
        return ",".join(f"{rate:g}" for rate in self.rates)

    def rate(self, depth: int) -> float:
        """Of a node at `depth`, from 1."""
        return self.rates[min(depth, len(self.rates)) - 1]


LEAST_MODEL_LEN = 64
"""Tokens; an engine whose memory holds no sequence of these is refused rather than given a lower limit."""


SettingsOfParts: Any = make_dataclass(
    "SettingsOfParts",
    [(name, *field) for name, field in merged("engine_settings").items()],
    frozen=True,
)
"""Settings of an engine that the parts that are there bring."""


@dataclass(frozen=True)
class EngineConfig(SettingsOfParts):
    """What bounds an engine's memory and its batches.

    Raises:
        ValueError: a limit is out of range or two limits contradict each other; names field and value.
    """

    max_num_seqs: int = NUM_SEQS["cpu"]
    """Sequences running at once; also the number of slot rows of every persistent buffer."""
    lower_max_num_seqs: bool = False
    """On a GPU, lower it to as many as the memory holds with contexts of some length (`num_seqs_held`)."""
    max_model_len: int = 2048
    """Longest sequence, prompt and output together, in tokens."""
    lower_max_model_len: bool = False
    """Lower it to what the model and the memory hold (`wingbeat.runtime.engine.memory.fit_to_memory`)."""
    max_num_batched_tokens: int = PROMPT_TOKENS["cpu"]
    """Prompt tokens computed per round beside the running sequences' trees."""
    lower_max_num_batched_tokens: bool = False
    """On a GPU, lower it where the memory that such a round takes is wanted for KV (`fit_to_memory`)."""
    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """KV blocks; None sizes the pool from `kv_cache_memory_bytes`."""
    kv_cache_memory_bytes: int | None = None
    """Memory budget of the verifier's KV pool where `num_kv_blocks` is None; None goes by the next two."""
    kv_cache_dtype: str = "auto"
    """"fp8" rounds keys and values to float8_e4m3fn as they are stored; "auto" has the dtype of the weights."""
    gpu_memory_utilization: float = 0.9
    """Of the GPU's memory, what this engine may hold: weights, activations, graphs, KV, and its drafter's beside it."""
    cpu_memory_utilization: float = 0.25
    """On a CPU, the share of the RAM that is free beside the weights which goes to KV."""
    gpu_share: float = 1.0
    """Of its GPU, what is this engine's and its drafter's."""
    drafter_beside: bool = True
    """The drafter's memory is of the same device."""
    enable_prefix_caching: bool = True
    drafter_timeout_s: float = 5.0
    """A drafter that stays silent this long in the middle of a round counts as stuck."""
    cuda_graphs: str | bool | None = None
    """Of `GRAPH_MODES`: replay rounds as CUDA graphs, those with prompt chunks too where there are graphs for them; or
    those without prompt chunks alone, or none. None is full on CUDA."""
    kernels: str = "auto"
    """`auto` runs compiled kernels on CUDA where they compute what their torch references do; `torch` those alone."""
    overlap: bool | None = None
    """Let the host run one round behind the device. None does so where the device is not the host itself."""
    deterministic: bool = False
    """A request gets the same bits, so the same tokens, in any dtype: with and without speculation, alone and in any
    batch, preempted or not, its prefix found or computed; for layers that are our kernels'."""
    forced_acceptance: ForcedAcceptance | None = None
    """For benchmarks: acceptance is drawn from this profile, and the text is not the model's. Refused unless the
    environment variable WINGBEAT_BENCHMARK is 1; every output is marked."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_model_len", "max_num_batched_tokens", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: use at least 1")
        check_most(self, MOST_OF_ENGINE)
        for check in hooks("check_limits"):
            check(self)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype is {self.kv_cache_dtype!r}: use one of {', '.join(KV_CACHE_DTYPES)}")
        if self.kernels not in KERNEL_CHOICES:
            raise ValueError(f"kernels is {self.kernels!r}: use one of {', '.join(KERNEL_CHOICES)}")
        if isinstance(self.cuda_graphs, str) and self.cuda_graphs not in GRAPH_MODES:
            raise ValueError(f"cuda_graphs is {self.cuda_graphs!r}: use one of {', '.join(GRAPH_MODES)}")
        refuse(self.asked())
        for name in ("gpu_share", "gpu_memory_utilization", "cpu_memory_utilization"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: use a share above 0, at most 1")
        fixed = self.num_kv_blocks is not None and not self.lower_max_model_len
        if fixed and self.num_kv_blocks < self.max_blocks_per_seq + 1:
            raise ValueError(
                f"num_kv_blocks is {self.num_kv_blocks}: one sequence of max_model_len {self.max_model_len} "
                f"needs {self.max_blocks_per_seq + 1}; raise num_kv_blocks or lower max_model_len"
            )
        if self.forced_acceptance is not None and os.environ.get(BENCHMARK_VARIABLE) != "1":
            raise ValueError(
                f"forced_acceptance is {self.forced_acceptance}: its text is not the model's, so it is for benchmarks "
                f"only; set {BENCHMARK_VARIABLE}=1"
            )

    def asked(self) -> dict[Feature, str]:
        """Features that do not go with everything, as they are asked for here."""
        asked = {
            Feature.CUDA_GRAPHS: (asks_for_graphs(self.cuda_graphs), f"cuda_graphs is {self.cuda_graphs}"),
            Feature.DETERMINISTIC: (self.deterministic, "deterministic is True"),
            Feature.FORCED_ACCEPTANCE: (self.forced_acceptance is not None, "forced_acceptance is given"),
            Feature.FP8_KV: (self.kv_cache_dtype == "fp8", "kv_cache_dtype is fp8"),
        }
        return {feature: said for feature, (is_asked, said) in asked.items() if is_asked}

    @property
    def may_capture(self) -> bool:
        """Whether something is captured, on a device that can."""
        return self.cuda_graphs is None or asks_for_graphs(self.cuda_graphs)

    @property
    def max_blocks_per_seq(self) -> int:
        """Width of a block table: the longest sequence and the scratch slots of its token tree."""
        return -(-(self.max_model_len + self.speculation.num_nodes) // self.block_size)


def asks_for_graphs(cuda_graphs: str | bool | None) -> bool:
    """Whether a setting insists that something is captured."""
    return cuda_graphs not in (None, False, GRAPH_MODES[-1])
