"""Sizes and limits of an engine, which are validated at construction and then frozen."""

import os
from dataclasses import dataclass, field, make_dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from wingbeat.runtime.parts import first_result, hooks, merged
from wingbeat.runtime.refusals import Feature, refuse

NUM_BINS = 16
"""Number of bins of the drafter's confidence; acceptance is counted for each bin."""


MOST_OF_TREE = {"draft_steps": 256, "draft_top_k": 256, "verify_tree_size": 1024}
MOST_OF_ENGINE = {
    **{"max_num_seqs": 2**20, "max_model_len": 2**31 - 1, "max_num_batched_tokens": 2**30, "block_size": 2**16},
    **{"num_kv_blocks": 2**31 - 1},
}
"""Upper bounds that only typing errors exceed. Larger values would fail without a clear error, because no machine has
the memory or because items are created one at a time.
"""


def check_most(config: object, most: dict[str, int]) -> None:
    """Raises ValueError, which names field and value, for a number above its limit.

    Fields that are None are not checked.
    """
    for name, limit in most.items():
        if (getattr(config, name) or 0) > limit:
            raise ValueError(f"{name} is {getattr(config, name)}: use at most {limit}")


class DrawnTree(Protocol):
    """Fixed shape of draft trees, as a user has defined it node by node."""

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Path of each node: the ranks among siblings, from the root's child down to the node."""
        ...

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        ...

    @property
    def width(self) -> int:
        """The larger of two maxima: the candidates per expanded node, and the nodes expanded at one level."""
        ...


def drawn_tree(given: Any) -> DrawnTree:
    """Parses a tree given as paths of ranks.

    Raises ValueError if `given` is not a tree, or if no runtime part drafts drawn trees.
    """
    if (tree := first_result("drawn_tree", given)) is None:
        raise ValueError(f"is {given!r}: give a number")
    return tree


@dataclass(frozen=True)
class SpeculationConfig:
    """Shape of a sequence's draft tree in a round (EAGLE-2 section 4; the names are Edge-LLM's)."""

    draft_steps: int = 5
    """Number of levels of the tree below its root."""
    draft_top_k: int = 4
    """Number of children per expanded node, and number of nodes expanded per level. With 1, drafts are chains."""
    verify_tree_size: int = 16
    """Number of nodes, including the root, that the verifier checks in each round of a sequence."""
    adaptive: bool = False
    """Whether each round's depth and nodes are chosen from measured costs and tracked acceptance. Rounds then stay
    within the shape above and may have no draft at all. False without the part `adaptive`.
    """
    draft_tree: DrawnTree | None = None
    """Fixed tree to draft regardless of probabilities; the three numbers above follow from this tree. If None, the
    likeliest nodes are drafted."""

    @classmethod
    def of_tree(cls, tree: DrawnTree, adaptive: bool = False) -> "SpeculationConfig":
        """Returns the shape of a drawn tree. With `adaptive`, rounds prune the tree to the nodes that pay."""
        return cls(tree.depth, tree.width, 1 + len(tree.paths), adaptive, tree)

    @classmethod
    def default(cls, device: str, **given: Any) -> "SpeculationConfig":
        """Returns the default shape for a device, with the fields that the user has set.

        On a CPU every verified node costs time, so the default is a chain, as deep as draft heads are trained for. A
        GPU verifies a small tree in the time of a single token, so the default is a tree. With `adaptive`, chain and
        tree are pruned to the nodes that pay.

        Args:
            device: "cpu" or "cuda".
            given: fields set by the user.

        Raises:
            ValueError: a field is out of range.
        """
        adapts = bool(hooks("speculation"))
        given = {"adaptive": adapts} | given
        if given["adaptive"] and not adapts:
            raise ValueError("adaptive is True: this installation lacks the package runtime.adaptive; leave it out")
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
            raise ValueError(
                f"{name} is {value} but draft_top_k is a tree, which defines the whole shape: leave {name} out"
            )
        return cls.of_tree(drawn_tree(draft_top_k), adaptive)

    def __post_init__(self) -> None:
        for name in ("draft_steps", "draft_top_k"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is {getattr(self, name)}: use at least 1 (drafter 'none' switches drafting off)"
                )
        check_most(self, MOST_OF_TREE)
        if self.adaptive and not hooks("speculation"):
            object.__setattr__(self, "adaptive", False)
        if self.verify_tree_size < 2:
            raise ValueError(
                f"verify_tree_size is {self.verify_tree_size}: use at least 2 (the root and one drafted node)"
            )

    @cached_property
    def num_nodes(self) -> int:
        """Number of nodes of a tree, including the root.

        The number is below `verify_tree_size` if the drafted nodes are fewer.
        """
        k, steps = self.draft_top_k, self.draft_steps
        return min(self.verify_tree_size, 1 + k + (steps - 1) * k * k)

    @cached_property
    def max_path(self) -> int:
        """Maximum number of tokens that a round can emit: one per level, and the bonus token."""
        return min(self.draft_steps, self.num_nodes - 1) + 1


TREE_FIELDS = ("draft_steps", "draft_top_k", "verify_tree_size", "adaptive")
"""Fields of `SpeculationConfig` that a user may set."""


def default_by_device(name: str) -> str:
    """Describes a field's defaults by device, for option help."""
    on_cpu, on_gpu = (getattr(SpeculationConfig.default(device), name) for device in ("cpu", "cuda"))
    return f"by default {on_cpu} on CPUs and {on_gpu} on GPUs"


NUM_SEQS = {"cpu": 16, "cuda": 256}
"""Default number of concurrent sequences by device type. On a GPU, the number is lowered if memory holds fewer
sequences."""
PROMPT_TOKENS = {"cpu": 512, "cuda": 2048}
"""Default number of prompt tokens computed per round, by device type. A GPU computes 2048 tokens in the time of a few
hundred."""


DTYPES = ("float32", "bfloat16", "float16")
"""Names, as torch spells them, of dtypes of weights and KV."""
DTYPE_NAMES = {
    **{"fp32": "float32", "f32": "float32", "float": "float32", "single": "float32"},
    **{"bf16": "bfloat16", "bfloat": "bfloat16"},
    **{"fp16": "float16", "f16": "float16", "half": "float16"},
    **{"fp64": "float64", "f64": "float64", "double": "float64"},
}
"""Aliases of dtype names, mapped to torch's names."""
FloatName = Literal["float32", "bfloat16", "float16"]
INT8 = "int8"
"""Value of the dtype option that means float32 with linear weights rounded to eight bits, with one scale per output
channel."""


def dtype_name(written: str) -> str:
    """Returns torch's name of a dtype that is written in any usual way. Other text is returned unchanged."""
    name = written.strip().lower().removeprefix("torch.")
    return DTYPE_NAMES.get(name, name)


def resolve_dtype(name: str | None, device: str, stored: str | None) -> str:
    """Returns the dtype of activations, KV and (except for `INT8`) weights on a device.

    Args:
        name: a dtype, which is returned unchanged. None and "auto" leave the choice to the device ("cpu" or "cuda").
        stored: dtype of the weights according to the checkpoint's config; None if the config does not name a dtype.

    Raises:
        ValueError: `name` is none of `DTYPES`, `INT8`, "auto" and None.
    """
    if name == INT8:
        return "float32"
    if name not in (None, "auto"):
        if name not in DTYPES:
            raise ValueError(f"dtype is {name!r}: use one of auto, {', '.join(DTYPES)}, {INT8}")
        return name
    if device == "cpu":
        return "float32"
    # A GPU multiplies 16-bit floats many times faster than 32-bit floats.
    return stored if stored in ("bfloat16", "float16") else "bfloat16"


KV_CACHE_DTYPES = ("auto", "fp8")
"""Values of the setting for the KV cache's dtype: auto means the weights' dtype, fp8 means float8_e4m3fn."""
KERNEL_CHOICES = ("auto", "torch")
GRAPH_MODES = ("full", "decode_only", "none")
"""Values of `EngineConfig.cuda_graphs`; True means "full" and False means "none"."""


BENCHMARK_VARIABLE = "WINGBEAT_BENCHMARK"
"""Environment variable that must be 1 for an engine to emit text that the model did not choose."""


@dataclass(frozen=True)
class ForcedAcceptance:
    """Forced acceptance for benchmarks: all computation takes place, but the number of accepted nodes is random."""

    rates: tuple[float, ...]
    """Acceptance rates: rates[d] is the probability that a node at depth d + 1 is accepted if its parent is accepted.
    The last rate holds for all deeper levels."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(float(rate) for rate in self.rates))
        if not self.rates or not all(0.0 <= rate <= 1.0 for rate in self.rates):
            raise ValueError(f"forced_acceptance.rates is {self.rates}: use at least one rate, each from 0 to 1")

    @classmethod
    def flat(cls, rate: float) -> "ForcedAcceptance":
        """Returns a profile with the same rate at every depth."""
        return cls((rate,))

    @classmethod
    def length(cls, num_tokens: float) -> "ForcedAcceptance":
        """Returns a profile with an average of `num_tokens` tokens per verified tree, including the bonus token.

        Drawn lengths differ from the average by less than one token.

        Raises:
            ValueError: `num_tokens` is below 1, which is impossible because the bonus token counts as 1.
        """
        if num_tokens < 1.0:
            raise ValueError(f"forced acceptance length is {num_tokens}: use at least 1, the bonus token")
        certain = int(num_tokens - 1.0)
        return cls((*[1.0] * certain, num_tokens - 1.0 - certain, 0.0))

    def __str__(self) -> str:
        return ",".join(f"{rate:g}" for rate in self.rates)

    def rate(self, depth: int) -> float:
        """Acceptance rate of a node at `depth`, counted from 1."""
        return self.rates[min(depth, len(self.rates)) - 1]


LEAST_MODEL_LEN = 64
"""Shortest max_model_len, in tokens: an engine whose memory does not hold a single sequence of this length is refused.
"""


SettingsOfParts: Any = make_dataclass(
    "SettingsOfParts",
    [(name, *field) for name, field in merged("engine_settings").items()],
    frozen=True,
)
"""Base class with the engine settings that runtime parts add."""


@dataclass(frozen=True)
class EngineConfig(SettingsOfParts):
    """Limits of an engine's memory and batches.

    Raises:
        ValueError: a limit is out of range, or two limits contradict each other; the message names field and value.
    """

    max_num_seqs: int = NUM_SEQS["cpu"]
    """Maximum number of sequences that run at once; also the number of slots."""
    lower_max_num_seqs: bool = False
    """Whether max_num_seqs is lowered, on a GPU, to the number of sequences of typical length that memory holds
    (`num_seqs_held`)."""
    max_model_len: int = 2048
    """Maximum length of a sequence, prompt and output together, in tokens."""
    lower_max_model_len: bool = False
    """Whether max_model_len is lowered to the length that model and memory allow
    (`wingbeat.runtime.engine.memory.fit_to_memory`)."""
    max_num_batched_tokens: int = PROMPT_TOKENS["cpu"]
    """Maximum number of prompt tokens computed per round; tokens of running sequences' trees are not counted."""
    lower_max_num_batched_tokens: bool = False
    """Whether max_num_batched_tokens is lowered, on a GPU, if memory for rounds of that size is needed for KV
    (`fit_to_memory`)."""
    block_size: int = 16
    """Number of tokens per KV block."""
    num_kv_blocks: int | None = None
    """Number of KV blocks; if None, the number is derived from `kv_cache_memory_bytes`."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the verifier's KV pool, if `num_kv_blocks` is None. If both are None, the pool's size is derived from
    the utilization settings."""
    kv_cache_dtype: str = "auto"
    """"fp8" rounds keys and values to float8_e4m3fn when storing them; "auto" uses the weights' dtype."""
    gpu_memory_utilization: float = 0.9
    """Fraction of the GPU's memory that this engine may use for weights, activations, graphs, KV, and a drafter on the
    same GPU."""
    cpu_memory_utilization: float = 0.25
    """On a CPU, KV may use this fraction of the RAM that is free after the weights are loaded."""
    gpu_share: float = 1.0
    """Fraction of the GPU that this engine and its drafter may use."""
    drafter_beside: bool = True
    """Whether the drafter uses memory of the engine's device."""
    enable_prefix_caching: bool = True
    drafter_timeout_s: float = 5.0
    """Seconds without an answer to a round after which a drafter counts as stuck."""
    cuda_graphs: str | bool | None = None
    """Member of `GRAPH_MODES`: "full" replays rounds as CUDA graphs, including rounds with prompt chunks if captured;
    "decode_only" replays only rounds without prompt chunks; "none" replays no graphs. None is "full" on CUDA."""
    kernels: str = "auto"
    """`auto` runs compiled kernels on CUDA if the kernels match their torch references; `torch` runs only the
    references.
    """
    overlap: bool | None = None
    """Whether each round is launched before the previous round's tokens are processed on the host. None means True,
    except on a CPU."""
    deterministic: bool = False
    """Whether a request gets the same bits and tokens in every batch, with and without speculation, preempted or not,
    and with its prefix cached or computed. This holds for each dtype, and requires layers that run on Wingbeat's
    kernels."""
    forced_acceptance: ForcedAcceptance | None = None
    """Profile from which acceptance is drawn in benchmarks, so that the generated text is not the model's. The setting
    is refused unless the environment variable WINGBEAT_BENCHMARK is 1, and every output is marked.
    """
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
        """Requested features that exclude other features, each with the text of the setting that requests it."""
        asked = {
            Feature.CUDA_GRAPHS: (asks_for_graphs(self.cuda_graphs), f"cuda_graphs is {self.cuda_graphs}"),
            Feature.DETERMINISTIC: (self.deterministic, "deterministic is True"),
            Feature.FORCED_ACCEPTANCE: (self.forced_acceptance is not None, "forced_acceptance is given"),
            Feature.FP8_KV: (self.kv_cache_dtype == "fp8", "kv_cache_dtype is fp8"),
        }
        return {feature: said for feature, (is_asked, said) in asked.items() if is_asked}

    @property
    def may_capture(self) -> bool:
        """Whether the settings allow rounds to be captured; the device may still be unable to capture."""
        return self.cuda_graphs is None or asks_for_graphs(self.cuda_graphs)

    @property
    def max_blocks_per_seq(self) -> int:
        """Number of columns of a block table: blocks for the longest sequence and for its draft tree."""
        return -(-(self.max_model_len + self.speculation.num_nodes) // self.block_size)


def asks_for_graphs(cuda_graphs: str | bool | None) -> bool:
    """Whether the `cuda_graphs` setting requires that rounds are captured."""
    return cuda_graphs not in (None, False, GRAPH_MODES[-1])
