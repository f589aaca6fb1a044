"""Everything an operator can set about a Wingbeat application; knows nothing of Ray objects or models."""

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
from wingbeat.deployments.parts import first, hooks, merged
from wingbeat.runtime.config import NUM_SEQS, PROMPT_TOKENS, EngineConfig, asks_for_graphs
from wingbeat.runtime.hub import HubName
from wingbeat.runtime.refusals import Feature
from wingbeat.runtime.settings import Settings

_ENGINE = EngineConfig()
DEFAULT_POSITIONS = _ENGINE.max_model_len
"""Of a model whose config.json does not say how many it has; what it turns out to have may be fewer."""

CPUS_OF_DRAFTER, CPUS_OF_ROUTER = 0.3, 0.1
"""That Ray sets aside; they bound how many fit on a node, not what each may use of it."""

_MOST_CALLS, _MOST_OF_ANY = 2**31 - 1, 2**63 - 1


PartSettings = create_model("PartSettings", __base__=Settings, **merged("settings"))
"""Settings of the parts that are there."""


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
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    served_model_name: str | None = Field(
        None,
        description="Name clients pass as `model`, or several separated by commas, of which answers bear the first; "
        "none uses the directory's name.",
    )

    max_queued_requests: int = Field(
        256, ge=0, description="Requests a router holds beyond what its engines run at once before it answers 503."
    )
    engine_wait_s: float = Field(
        120.0,
        ge=0,
        description="What a request waits where no engine is there, such as while one is started; 0 answers 503 at "
        "once.",
    )
    max_ongoing_requests: int = Field(1024, ge=1, description="HTTP requests one router replica handles at once.")
    shutdown_timeout_s: float = Field(
        30.0, ge=0, description="What running requests have to end when the server or a replica is told to stop."
    )

    max_num_seqs: int | None = Field(
        None,
        description=f"Sequences one engine runs at once; by default {NUM_SEQS['cpu']} on CPUs, and on GPUs as many of "
        f"{NUM_SEQS['cuda']} as the memory holds.",
    )
    max_model_len: int | None = Field(
        None,
        description="Prompt and output together, in tokens; none takes the model's positions, as far as the memory "
        "holds a sequence of them.",
    )
    max_num_batched_tokens: int | None = Field(
        None,
        description=f"Prompt tokens per round; by default {PROMPT_TOKENS['cpu']} on CPUs and {PROMPT_TOKENS['cuda']} "
        "on GPUs, or less where their memory is short.",
    )
    block_size: int = Field(_ENGINE.block_size, description="Tokens per KV block.")
    num_kv_blocks: int | None = Field(None, description="KV blocks; none sizes the pool by kv_cache_memory_bytes.")
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Budget of the KV pool; none goes by gpu_memory_utilization, and on CPUs takes "
        f"{_ENGINE.cpu_memory_utilization:.0%} of the RAM that is free beside the weights, per replica.",
    )
    gpu_memory_utilization: float = Field(
        _ENGINE.gpu_memory_utilization,
        description="Of the GPU's memory (of the pair's share of it), what weights, activations, graphs, KV and a "
        "drafter on the same GPU may hold together.",
    )
    enable_prefix_caching: bool = Field(_ENGINE.enable_prefix_caching, description="Reuse KV of equal prefixes.")
    drafter_timeout_s: float = Field(_ENGINE.drafter_timeout_s, gt=0, description="Silence that counts as stuck.")
    drafter_back_off_s: float = Field(
        1.0,
        ge=0,
        description="Pause before a drafter that failed again is replaced; doubles with each failure, up to 30 s.",
    )
    stream_interval_ms: float = Field(
        20.0, ge=0, description="Least time between two messages of one engine to one router; first tokens never wait."
    )

    channel: Literal["auto", "shm", "cuda_ipc", "remote"] = Field(
        "auto",
        description="What carries rounds between verifier and drafter: host memory, GPU memory, or a connection "
        "between nodes. 'auto' is remote where they are on two, else cuda_ipc where both have a GPU, else shm.",
    )
    # The words come first: they are what a command line has after the option's name.
    cuda_graphs: Literal["full", "decode_only", "none"] | bool | None = Field(
        None,
        description="Replay rounds as CUDA graphs; decode_only: those of decodes without prompts. By default full on "
        "GPUs; true is full, and false none.",
    )
    num_gpus_per_verifier: float = Field(
        0.0,
        ge=0,
        description="A GPU, or a share of one, per verifier; of each of its ranks, where it has several. With neither "
        "share given, 1 and 1 where two GPUs are free for a pair, else 0.7 and 0.3 of one.",
    )
    num_gpus_per_drafter: float = Field(0.0, ge=0, description="A GPU, or a share of one, per drafter.")
    num_cpus_per_verifier: float = Field(0.5, ge=0, description="CPUs Ray sets aside per verifier.")
    verifier_resources: NodeResources = Field(
        None,
        description="Ray resources of the nodes that verifiers may run on, beside CPUs and GPUs, such as big_gpu; each "
        "rank takes the amounts.",
    )

    engine_factory: str | None = Field(
        None, description="`module:function` from this config to an engine other than Wingbeat's own."
    )
    drafter_factory: str | None = Field(
        None, description="`module:function` from this config to a drafter's worker other than Wingbeat's own."
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
            raise ValueError("must be names separated by commas, each one once")
        return value

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Refuse what overflows a clock or a field of Serve's messages."""
        for name, value in self:
            seconds = isinstance(value, float) and name.endswith(("_s", "_ms"))
            most = MOST_SECONDS if seconds else _MOST_CALLS if name == "max_ongoing_requests" else _MOST_OF_ANY
            if isinstance(value, int | float) and value > most:
                raise ValueError(f"{name} is {value}: use at most {most:g}")
        return self

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        """Refuse what no single field can see, naming field, value and what is allowed."""
        for check in hooks("check_settings"):
            check(self)
        for name in ("num_gpus_per_verifier", "num_gpus_per_drafter"):
            check_gpu_amount(name, getattr(self, name))
        if self.num_gpus_per_verifier > 1:
            raise ValueError(f"num_gpus_per_verifier is {self.num_gpus_per_verifier:g}: one process runs on one GPU")
        if self.has_channel() and not self.leaves_gpus_open():
            self.channel_kind()
        if (self.channel == "remote" or self.may_span_nodes()) and not hooks("network_channel"):
            raise ValueError("no channel reaches another node here: leave out drafter_resources, and channel remote")
        for name in ("engine_factory", "drafter_factory"):
            path = getattr(self, name)
            if path is not None and path.count(":") != 1:
                raise ValueError(f"{name} is {path!r}: must read module:function")
        self._limits(self.max_model_len or DEFAULT_POSITIONS)
        return self

    def asked(self) -> dict[str, tuple[bool, str]]:
        """Features that do not go with everything: whether each is asked for, and how."""
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
                Feature.CUDA_GRAPHS: (asks_for_graphs(self.cuda_graphs), f"cuda_graphs is {self.cuda_graphs}"),
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
        """Whether it is for the GPUs there are to decide device and shares.

        Until that is done everything is on the CPU, unless the device is given.
        """
        return bool(first("leaves_gpus_open", self))

    def is_wingbeats_own(self) -> bool:
        """Whether Wingbeat's own engine runs the model."""
        return self.engine_factory is None and self.engine_dir is None

    def engine_config(self) -> EngineConfig:
        """Limits of one engine, as the runtime takes them.

        Raises:
            ValueError: a limit is out of range; names field and value.
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
        """Sequences that one engine runs at once, before a GPU's memory has lowered them."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        return NUM_SEQS["cuda" if self._leaves_num_seqs_to_memory() else "cpu"]

    def _leaves_num_seqs_to_memory(self) -> bool:
        return self.max_num_seqs is None and self.is_wingbeats_own() and self.resolved_device() == "cuda"

    def text_identity(self) -> str:
        """What decides which tokens a request gets: where it is equal, engines may continue each other's texts."""
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
        """The same model by the same names with the same drafter, by the weights in another folder."""
        # How well the drafter does by them is for nobody here to say.
        kept = {"served_model_name": ",".join(self.model_names()), "drafter": str(self.choice().source)}
        made = self.model_copy(update={"model": folder, "allow_bad_drafter": True, **kept})
        made._named_dir = self.named_dir()
        return made

    def named_dir(self) -> Path:
        """The verifier's checkpoint as the settings have it; see `model_dir` for what it is and what it raises."""
        return self._named_dir or self.model_dir()

    def num_ranks(self) -> int:
        """Processes of each verifier, each with its share of a node."""
        return first("num_ranks", self) or 1

    def tries_bfloat16(self) -> bool:
        """As of a single process; several have the same dtype."""
        return self.num_ranks() == 1 and super().tries_bfloat16()

    def resolved_device(self) -> str:
        """`cpu` or `cuda`."""
        if self.device == "auto":
            return "cuda" if self.num_gpus_per_verifier > 0 else "cpu"
        return self.device

    def stuck_after_s(self) -> float:
        """What any round of an engine may take."""
        slow = self.resolved_device() == "cuda" or self.num_ranks() > 1
        return self.patience_s(slow, self.drafter_timeout_s)

    def shares_core(self) -> bool:
        """Whether the pair's threads, which take turns, are to be kept on one core, where one can be spared."""
        alone = self.num_threads() == 1 and self.num_ranks() == 1
        return self.resolved_device() == "cpu" and alone and self.has_own_drafter()

    def num_threads(self) -> int:
        """As of one pair; each of several would take what all of them have, so that they have 1 where none is given."""
        scaled = self.autoscaling_config is not None or (self.num_replicas or 1) > 1
        several = scaled or self.num_ranks() > 1 or self.num_shared_drafters() > 0
        return 1 if self.threads is None and several else super().num_threads()

    def drafter_device(self) -> str:
        """`cpu` or `cuda`; kinds that only look tokens up run on the CPU whatever share they have."""
        has_gpu = self.resolved_device() == "cuda" and (self.num_gpus_per_drafter > 0 or self.drafts_in_engine())
        return "cuda" if has_gpu and self.choice().can_use_gpu else "cpu"

    def channel_kind(self, one_node: bool = True) -> ChannelKind:
        """Kind of channel of a pair on one node or on two.

        Raises:
            ValueError: the kind asked for needs a GPU that a side does not have; names the side.
        """
        return choose_channel(self.channel, self.resolved_device(), self.drafter_device(), one_node)

    def may_span_nodes(self) -> bool:
        """Whether Ray may put a drafter on another node than its verifier."""
        elsewhere = self.channel == "remote" or (self.channel == "auto" and self.drafter_resources is not None)
        return elsewhere and not self.num_shared_drafters()

    def verifier_share(self) -> Share:
        """Of a node that a verifier takes, or each of its ranks."""
        return Share(self.num_cpus_per_verifier, self.num_gpus_per_verifier, self.verifier_resources)

    def drafter_share(self) -> Share:
        """What Ray sets aside for a drafter."""
        return Share(CPUS_OF_DRAFTER, self.num_gpus_per_drafter, self.drafter_resources)

    def may_take_drafter_in(self) -> bool:
        """Whether an engine loads its drafter itself where GPU memory carries nothing between two processes.

        Nothing was chosen by name that this would go against, and both are on one GPU, whose memory then holds it.
        """
        by_name = self.channel != "auto" or "drafter_place" in self.model_fields_set
        alone = self.num_ranks() == 1 and self.has_own_drafter() and self.is_wingbeats_own()
        on_gpu = alone and not by_name and self.resolved_device() == self.drafter_device() == "cuda"
        return on_gpu and self.engine_config().drafter_beside

    def model_names(self) -> tuple[str, ...]:
        """What clients pass as `model`; answers bear the first one."""
        if self.served_model_name is not None:
            return tuple(_names_in(self.served_model_name))
        if self.model is None:
            return ("wingbeat-demo",)
        name = HubName.parse(self.model)
        return (self.model.resolve().name if name is None else name.repository,)

    def model_name(self) -> str:
        """The first of them."""
        return self.model_names()[0]

    def all_names(self) -> tuple[str, ...]:
        """Names that requests may give as `model`, those of variants included."""
        return (*self.model_names(), *(name for of in hooks("variant_names") for name in of(self)))

    def served(self) -> "tuple[AppConfig, ...]":
        """The settings of each model, complete; of one model, these.

        Raises:
            ValueError: a setting stands where it does not belong, or is wrong.
        """
        return first("served", self) or (self,)


def _names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
