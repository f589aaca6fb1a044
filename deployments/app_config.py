"""All settings of a Wingbeat application. This module uses no Ray objects and loads no model."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, PrivateAttr, create_model, field_validator, model_validator

from wingbeat.cluster.placement import ROUNDING, ChannelKind, Share, check_gpu_amount, choose_channel
from wingbeat.deployments.limits import MOST_SECONDS
from wingbeat.deployments.options.benchmark_options import BenchmarkOptions
from wingbeat.deployments.options.drafter_place_options import DrafterPlaceOptions
from wingbeat.deployments.options.node_resources import NodeResources
from wingbeat.deployments.options.scaling_options import ScalingOptions
from wingbeat.deployments.options.surface_options import SurfaceOptions
from wingbeat.deployments.options.wait_options import WaitOptions
from wingbeat.deployments.parts import first_result, hooks, merged
from wingbeat.runtime.config import NUM_SEQS, PROMPT_TOKENS, EngineConfig
from wingbeat.runtime.hub import HubName
from wingbeat.runtime.refusals import Feature
from wingbeat.runtime.settings import Settings

_ENGINE = EngineConfig()
DEFAULT_POSITIONS = _ENGINE.max_model_len
"""Context length in tokens that is assumed for a model whose config.json states none; the loaded model may lower it."""

CPUS_OF_DRAFTER, CPUS_OF_ROUTER = 0.3, 0.1
"""CPUs that Ray reserves for a drafter and for a router. The numbers limit how many processes Ray places on a node, but
not how much CPU time a process can use.
"""

_MOST_CALLS, _MOST_OF_ANY = 2**31 - 1, 2**63 - 1


PartSettings = create_model("PartSettings", __base__=Settings, **merged("settings"))
"""Settings of the installed parts."""


class AppConfig(
    ScalingOptions,
    DrafterPlaceOptions,
    SurfaceOptions,
    WaitOptions,
    BenchmarkOptions,
    PartSettings,
):
    """Arguments of `wingbeat.deployments.app:build`, from `key=value` on the command line or `args:` in YAML.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type or out of range.
    """

    served_model_name: str | None = Field(
        None,
        description="Name that clients pass as `model`, or several names separated by commas; answers carry the "
        "first of them. By default the name of the model's folder, its org/name on the hub or its short name; for "
        "the demo pair wingbeat-demo.",
    )

    max_queued_requests: int = Field(
        256,
        ge=0,
        description="Requests that may wait, over all engines and routers together, beyond the max_num_seqs that "
        "each engine runs; further requests are answered by 503.",
    )
    engine_wait_s: float = Field(
        120.0,
        ge=0,
        description="Seconds that a request waits for an engine if none is running, such as while an engine "
        "starts. With 0 such a request gets a 503 at once.",
    )
    max_ongoing_requests: int = Field(1024, ge=1, description="HTTP requests that one router replica handles at once.")
    shutdown_timeout_s: float = Field(
        30.0,
        ge=0,
        description="Seconds that running requests have to end after the server or a replica is told to stop.",
    )

    max_num_seqs: int | None = Field(
        None,
        description=f"Sequences that one engine runs at once. By default {NUM_SEQS['cpu']} on CPUs, and on GPUs as "
        f"many of {NUM_SEQS['cuda']} as the memory holds.",
    )
    max_model_len: int | None = Field(
        None,
        description="Maximum tokens of prompt and answer together. By default the model's positions, or fewer if the "
        "KV memory does not hold one sequence of that length.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        description="Maximum prompt tokens that a round computes, in addition to the tokens of the sequences that "
        f"decode. By default {PROMPT_TOKENS['cpu']} on CPUs and {PROMPT_TOKENS['cuda']} on GPUs; on GPUs 1024 or "
        "512 if memory is short.",
    )
    block_size: int = Field(_ENGINE.block_size, description="Tokens per block of the KV cache.")
    num_kv_blocks: int | None = Field(
        None,
        description="KV blocks of the verifier; the drafter has as many of its own. By default as many as "
        "kv_cache_memory_bytes holds.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Bytes of the verifier's KV pool (per rank); the drafter has as many blocks of its own. By "
        f"default the memory that gpu_memory_utilization leaves on GPUs, and {_ENGINE.cpu_memory_utilization:.0%} "
        "of the RAM that is free in addition to the weights, per replica, on CPUs.",
    )
    gpu_memory_utilization: float = Field(
        _ENGINE.gpu_memory_utilization,
        description="Fraction of the GPU's memory (of the pair's share of it) that weights, activations, graphs, KV "
        "cache and a drafter on the same GPU may take together.",
    )
    enable_prefix_caching: bool = Field(
        _ENGINE.enable_prefix_caching, description="Reuse the KV cache of equal prompt prefixes."
    )
    drafter_timeout_s: float = Field(
        _ENGINE.drafter_timeout_s,
        gt=0,
        description="Seconds without an answer after which a drafter counts as stuck and is replaced. A single "
        "round waits at most 0.15 s, or twice the drafter's usual answer time if that is longer, and then decodes "
        "plainly. On GPUs a drafter's first answer may take 60 s, because its kernels are compiled.",
    )
    drafter_back_off_s: float = Field(
        1.0,
        ge=0,
        description="Seconds of pause before another drafter is started after the second failure in a series; each "
        "further failure doubles the pause, up to 30 s.",
    )
    stream_interval_ms: float = Field(
        20.0,
        ge=0,
        description="Minimum milliseconds between two messages from an engine to a router; each message carries "
        "all tokens since the last one. The first token of an answer is sent at once.",
    )

    channel: Literal["auto", "shm", "cuda_ipc", "remote"] = Field(
        "auto",
        description="How verifier and drafter exchange rounds: 'shm' (host memory), 'cuda_ipc' (GPU memory) or "
        "'remote' (a connection between nodes). 'auto' is remote if drafter_resources places verifier and drafter "
        "on two nodes, else cuda_ipc if both are on a GPU (with a fallback if the GPUs cannot share memory), else "
        "shm.",
    )
    num_gpus_per_verifier: float = Field(
        0.0,
        ge=0,
        description="Number of GPUs, a fraction or 1, of each verifier, or of each of its ranks if it has several. "
        "If neither num_gpus_per_verifier nor num_gpus_per_drafter is given, they are 1 and 1 if two GPUs are free "
        "for a pair, and 0.7 and 0.3 of one GPU otherwise.",
    )
    num_gpus_per_drafter: float = Field(
        0.0, ge=0, description="Number of GPUs, a fraction or 1, of each drafter; see num_gpus_per_verifier."
    )
    num_cpus_per_verifier: float = Field(
        0.5,
        ge=0,
        description=f"CPUs that Ray reserves for each verifier, in addition to {CPUS_OF_DRAFTER} for each drafter "
        f"and {CPUS_OF_ROUTER} for each router. These numbers limit how many processes Ray places on a node, but "
        "not how much CPU time a process uses.",
    )
    verifier_resources: NodeResources = Field(
        None,
        description="Custom Ray resources that each verifier reserves, in addition to CPUs and GPUs, as JSON such "
        'as {"big_gpu": 1}; verifiers run only on nodes that have these resources. Each rank reserves these '
        "amounts.",
    )

    engine_factory: str | None = Field(
        None,
        description="`module:function` that takes these settings and returns an engine of yours in place of "
        "Wingbeat's.",
    )
    drafter_factory: str | None = Field(
        None,
        description="`module:function` that takes these settings and returns a drafter worker of yours in "
        "place of Wingbeat's.",
    )

    _named_dir: Path | None = PrivateAttr(None)

    @field_validator("served_model_name", mode="before")
    @classmethod
    def _names_of_list(cls, value: Any) -> Any:
        return ",".join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("served_model_name")
    @classmethod
    def _check_names(cls, value: str | None) -> str | None:
        names = [] if value is None else _names_in(value)
        if value is not None and (not all(names) or len(set(names)) < len(names)):
            raise ValueError("must be names separated by commas, without repeats")
        return value

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Refuses numbers that would overflow a clock or a field of Serve's messages."""
        for name, value in self:
            seconds = isinstance(value, float) and name.endswith(("_s", "_ms"))
            most = MOST_SECONDS if seconds else _MOST_CALLS if name == "max_ongoing_requests" else _MOST_OF_ANY
            if isinstance(value, int | float) and value > most:
                raise ValueError(f"{name} is {value}: use at most {most:g}")
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        """Refuses contradictions between fields; the message names a field, its value and the allowed values."""
        for check in hooks("check_settings"):
            check(self)
        for name in ("num_gpus_per_verifier", "num_gpus_per_drafter"):
            check_gpu_amount(name, getattr(self, name))
        if self.num_gpus_per_verifier > 1:
            raise ValueError(f"num_gpus_per_verifier is {self.num_gpus_per_verifier:g}: one process runs on one GPU")
        if self.has_channel() and not self.leaves_gpus_open():
            self.channel_kind()
        if (self.channel == "remote" or self.may_span_nodes()) and not hooks("network_channel"):
            raise ValueError(
                "no installed part has a channel to another node: leave out drafter_resources, and channel remote"
            )
        for name in ("engine_factory", "drafter_factory"):
            path = getattr(self, name)
            if path is not None and path.count(":") != 1:
                raise ValueError(f"{name} is {path!r}: must read module:function")
        self._limits(self.max_model_len or DEFAULT_POSITIONS)
        return self

    def asked(self) -> dict[str, tuple[bool, str]]:
        """Returns a pair for each feature that can conflict with another feature: whether the settings use the feature,
        and a phrase that names the setting in error messages.
        """
        device, is_open, node = self.resolved_device(), self.leaves_gpus_open(), self.may_span_nodes()
        share, of_drafter = self.num_gpus_per_verifier, self.num_gpus_per_drafter
        verifier, drafter = f"num_gpus_per_verifier is {share:g}", f"num_gpus_per_drafter is {of_drafter:g}"
        weighted = 0 < share <= 1 and not self.drafts_in_engine() and self.choice().has_weights
        where = "drafter_resources are given" if self.channel == "auto" else "channel is remote"
        on = f"device is {device}" if self.device == device else f"the verifier's device is {device}"
        return (
            super().asked()
            | merged("asked", self)
            | {
                Feature.CPU: (device == "cpu" and not is_open, on),
                Feature.CUDA: (device == "cuda", on),
                Feature.CUDA_WITHOUT_SHARE: (share == 0 and not is_open, verifier),
                Feature.DRAFTER_SHARE: (of_drafter > 0, drafter),
                Feature.DRAFTER_WITHOUT_SHARE: (of_drafter == 0, drafter),
                Feature.NAMED_CHANNEL: (self.channel in ("shm", "cuda_ipc"), f"channel is {self.channel}"),
                Feature.NO_QUEUE: (self.max_queued_requests == 0, "max_queued_requests is 0"),
                Feature.NO_WAIT: (self.engine_wait_s == 0, "engine_wait_s is 0"),
                Feature.OTHER_NODE: (node, where),
                Feature.OWN_ENGINE: (self.engine_factory is not None, f"engine_factory is {self.engine_factory}"),
                Feature.VERIFIER_SHARE: (share > 0, verifier),
                Feature.WEIGHTED_DRAFTER: (
                    weighted,
                    f"drafter {self.drafter!r} has weights beside a verifier on a GPU",
                ),
            }
        )

    def leaves_gpus_open(self) -> bool:
        """Whether device and GPU shares are chosen at the start, according to the GPUs that are found.

        Until then, unless `device` is given, everything counts as placed on the CPU.
        """
        return bool(first_result("leaves_gpus_open", self))

    def is_wingbeats_own(self) -> bool:
        """Whether Wingbeat's own engine runs the model (no `engine_factory`, no `engine_dir`)."""
        return self.engine_factory is None and self.engine_dir is None

    def engine_config(self) -> EngineConfig:
        """Returns the limits of one engine as the runtime's `EngineConfig`.

        Raises:
            ValueError: a limit is out of range; the message names field and value.
            ModelCheckpointError: the model's config.json cannot be read.
        """
        return self._limits(self.max_model_len or self._positions() or DEFAULT_POSITIONS)

    def _limits(self, max_model_len: int) -> EngineConfig:
        share, beside = self.num_gpus_per_verifier, self.resolved_device() == "cpu" or self.drafts_in_engine()
        packed = not self.may_span_nodes() and share + self.num_gpus_per_drafter <= 1 + ROUNDING
        if not self.num_shared_drafters() and self.drafter_device() == "cuda" and share < 1 and packed:
            share, beside = share + self.num_gpus_per_drafter, True
        return self._engine_config(
            max_num_seqs=self.most_num_seqs(),
            lower_max_num_seqs=self._leaves_num_seqs_to_memory(),
            max_model_len=max_model_len,
            lower_max_model_len=self.max_model_len is None,
            gpu_share=min(share, 1.0) or 1.0,
            drafter_beside=beside,
            **merged("engine_limits", self),
        )

    def most_num_seqs(self) -> int:
        """Returns the maximum number of sequences that one engine runs at once. An engine on a GPU may lower the
        number, so that the sequences fit in GPU memory.
        """
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return NUM_SEQS["cuda" if self._leaves_num_seqs_to_memory() else "cpu"]

    def _leaves_num_seqs_to_memory(self) -> bool:
        return self.max_num_seqs is None and self.is_wingbeats_own() and self.resolved_device() == "cuda"

    def text_identity(self) -> str:
        """Returns a text that describes all settings that affect the generated tokens.

        An engine may continue a request of another engine only if this method returns the same text for both engines.
        """
        engine = "torch" if self.engine_dir is None else f"the engines of {self.engine_dir}"
        dtype = "what is faster" if self.tries_bfloat16() else self.resolved_dtype()
        dtype += " with weights of int8" if self.rounds_weights() else ""
        more = f" over {self.num_ranks()} ranks" if self.num_ranks() > 1 else ""
        more += "".join(words(self) for words in hooks("text_identity"))
        more += f" with {self.kv_cache_dtype} KV" if self.kv_cache_dtype != "auto" else ""
        more += ", deterministic" if self.deterministic else ""
        more += "" if self.forced_acceptance is None else f", forced to accept {self.forced_acceptance}"
        return f"{self.model or 'the demo'} by {engine} in {dtype} on {self.resolved_device()}{more}"

    def with_weights(self, folder: Path) -> Self:
        """Returns a copy of the settings that loads the verifier's weights from another folder; model names and drafter
        stay the same.
        """
        # The drafter's acceptance with the new weights is unknown, so a failed self-test of the drafter must not
        # prevent the start.
        kept = {"served_model_name": ",".join(self.model_names()), "drafter": str(self.choice().source)}
        made = self.model_copy(update={"model": folder, "allow_bad_drafter": True, **kept})
        made._named_dir = self.named_dir()
        return made

    def named_dir(self) -> Path:
        """Returns the folder of the checkpoint that the settings name. For a copy made by `with_weights`, the result is
        the folder that the original settings name.
        """
        return self._named_dir or self.model_dir()

    def num_ranks(self) -> int:
        """Returns the number of ranks (processes) of each verifier."""
        return first_result("num_ranks", self) or 1

    def tries_bfloat16(self) -> bool:
        """Whether an engine chooses its dtype by timings. Always False with several ranks, because all ranks must have
        the same dtype.
        """
        return self.num_ranks() == 1 and super().tries_bfloat16()

    def resolved_device(self) -> str:
        """Returns `cpu` or `cuda`, according to `device` and the verifier's GPU share."""
        if self.device == "auto":
            return "cuda" if self.num_gpus_per_verifier > 0 else "cpu"
        return self.device

    def stuck_after_s(self) -> float:
        """Returns how many seconds a single round may take before the engine counts as stuck."""
        slow = self.resolved_device() == "cuda" or self.num_ranks() > 1
        return self.patience_s(slow, self.drafter_timeout_s)

    def shares_core(self) -> bool:
        """Whether verifier and drafter, which take turns, should be pinned to one CPU core if a core can be claimed."""
        alone = self.num_threads() == 1 and self.num_ranks() == 1
        return self.resolved_device() == "cpu" and alone and self.has_own_drafter()

    def num_threads(self) -> int:
        """Returns the number of CPU threads of a process; 0 if the process measures which number is fastest.

        With several pairs or ranks the default is 1, because each process would otherwise measure as if it had all
        cores for itself.
        """
        scaled = self.autoscaling_config is not None or (self.num_replicas or 1) > 1
        several = scaled or self.num_ranks() > 1 or self.num_shared_drafters() > 0
        return 1 if self.threads is None and several else super().num_threads()

    def drafter_device(self) -> str:
        """Returns `cpu` or `cuda`. A drafter that only looks up earlier text runs on the CPU even with a GPU share."""
        has_gpu = self.resolved_device() == "cuda" and (self.num_gpus_per_drafter > 0 or self.drafts_in_engine())
        return "cuda" if has_gpu and self.choice().can_use_gpu else "cpu"

    def channel_kind(self, one_node: bool = True) -> ChannelKind:
        """Returns the kind of channel between verifier and drafter; `one_node` is whether the two are on one node.

        Raises:
            ValueError: the kind needs a GPU that one side does not have; the message names the side.
        """
        return choose_channel(self.channel, self.resolved_device(), self.drafter_device(), one_node)

    def may_span_nodes(self) -> bool:
        """Whether Ray may place a drafter on another node than its verifier."""
        elsewhere = self.channel == "remote" or (self.channel == "auto" and self.drafter_resources is not None)
        return elsewhere and not self.num_shared_drafters()

    def verifier_share(self) -> Share:
        """Returns the resources of a node that Ray reserves for each rank of a verifier."""
        return Share(self.num_cpus_per_verifier, self.num_gpus_per_verifier, self.verifier_resources)

    def drafter_share(self) -> Share:
        """Returns the resources of a node that Ray reserves for a drafter."""
        return Share(CPUS_OF_DRAFTER, self.num_gpus_per_drafter, self.drafter_resources)

    def model_names(self) -> tuple[str, ...]:
        """Returns the names that clients may pass as `model`; answers contain the first name."""
        if self.served_model_name is not None:
            return tuple(_names_in(self.served_model_name))
        if self.model is None:
            return ("wingbeat-demo",)
        name = HubName.parse(self.model)
        return (self.model.resolve().name if name is None else name.repository,)

    def model_name(self) -> str:
        """Returns the first of `model_names`, which is the name in answers."""
        return self.model_names()[0]

    def all_names(self) -> tuple[str, ...]:
        """Returns all names that requests may pass as `model`, including variants of the model such as adapters."""
        return (*self.model_names(), *(name for of in hooks("variant_names") for name in of(self)))

    def served(self) -> "tuple[AppConfig, ...]":
        """Returns the complete settings of each served model; if there is a single model, these settings.

        Raises:
            ValueError: a setting is invalid; or a setting that must be given for each model is given for all models; or
                a setting of the whole application is given for one model.
        """
        return first_result("served", self) or (self,)


def _names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
