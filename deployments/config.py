"""Everything an operator can set about a Wingbeat application; knows nothing of Ray objects or models."""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from wingbeat.cluster.placement import ChannelKind, check_gpu_amount, choose_channel
from wingbeat.runtime.config import TREE_FIELDS, EngineConfig, SpeculationConfig, default_by_device, resolve_dtype
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import DrafterChoice, parse_drafter

_ENGINE_LIMITS = (
    "max_num_seqs",
    "max_model_len",
    "max_num_batched_tokens",
    "block_size",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "drafter_timeout_s",
    "compile",
    "overlap",
    "cuda_graphs",
)
_ENGINE = EngineConfig()


class AppConfig(BaseModel):
    """Arguments of `wingbeat.deployments.app:build`, from `key=value` on the command line or `args:` in YAML.

    Raises:
        pydantic.ValidationError: a field is unknown, of the wrong type, or outside what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model: Path | None = Field(None, description="Directory of the verifier's checkpoint; none serves the demo pair.")
    drafter: str = Field(
        "auto",
        description="Directory of an EAGLE head or of a draft model, 'mtp' (the model's own multi-token prediction), "
        "'suffix' or 'ngram' (earlier text continued), 'none' (plain decoding), the import path of a class, or 'auto': "
        "the demo pair's head for the demo model, 'mtp' where the model's checkpoint has it, 'ngram' for any other.",
    )
    allow_bad_drafter: bool = Field(
        False, description="Serve a drafter that fails its self-test at the start, with a warning."
    )
    served_model_name: str | None = Field(
        None, description="Name clients pass as `model`; none uses the directory's name."
    )

    num_replicas: int | None = Field(None, ge=1, description="Verifier + drafter pairs; 1 where nothing is given.")
    autoscaling_config: dict[str, Any] | None = Field(
        None, description="Ray Serve's autoscaling config for the pairs, in place of num_replicas."
    )
    num_router_replicas: int = Field(1, ge=1, description="HTTP router replicas.")
    router_autoscaling_config: dict[str, Any] | None = Field(
        None, description="Ray Serve's autoscaling config for the routers, in place of num_router_replicas."
    )
    max_queued_requests: int = Field(
        256, ge=0, description="Requests a router holds beyond what its engines run at once before it answers 503."
    )
    max_ongoing_requests: int = Field(1024, ge=1, description="HTTP requests one router replica handles at once.")

    max_num_seqs: int = Field(_ENGINE.max_num_seqs, description="Sequences one engine runs at once.")
    max_model_len: int = Field(_ENGINE.max_model_len, description="Prompt and output together, in tokens.")
    max_num_batched_tokens: int = Field(_ENGINE.max_num_batched_tokens, description="Prompt tokens per round.")
    block_size: int = Field(_ENGINE.block_size, description="Tokens per KV block.")
    num_kv_blocks: int | None = Field(None, description="KV blocks; none sizes the pool by kv_cache_memory_bytes.")
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Budget of the KV pool; none takes 256 MiB on CPUs, and on GPUs the verifier's share of 85 % of "
        "what is free beside the weights.",
    )
    enable_prefix_caching: bool = Field(_ENGINE.enable_prefix_caching, description="Reuse KV of equal prefixes.")
    draft_steps: int | None = Field(
        None, description=f"Most levels of a draft tree below its root; {default_by_device('draft_steps')}."
    )
    draft_top_k: int | None = Field(
        None, description=f"Children per expanded node, 1 drafts a chain; {default_by_device('draft_top_k')}."
    )
    verify_tree_size: int | None = Field(
        None,
        description="Most tree nodes verified per sequence and round, root included; "
        f"{default_by_device('verify_tree_size')}.",
    )
    adaptive: bool | None = Field(
        None,
        description="Let measured costs and tracked acceptance decide each round's depth and nodes, or that nothing is "
        f"drafted; {default_by_device('adaptive')}.",
    )
    drafter_timeout_s: float = Field(_ENGINE.drafter_timeout_s, gt=0, description="Silence that counts as stuck.")
    stream_interval_ms: float = Field(
        20.0, ge=0, description="Least time between two messages of one engine to one router; first tokens never wait."
    )

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV; 'auto' is bfloat16 on GPUs, float32 on CPUs."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="'auto' is cuda where num_gpus_per_verifier is above 0, cpu elsewhere."
    )
    channel: Literal["auto", "shm", "cuda_ipc"] = Field(
        "auto",
        description="What carries rounds between verifier and drafter: host memory, or GPU memory where both have a "
        "GPU. 'auto' is cuda_ipc where both have one, shm elsewhere.",
    )
    compile: bool = Field(False, description="Run the models through torch.compile; longer start, faster rounds.")
    overlap: bool | None = Field(
        None, description="Run the host one round behind the device; by default on GPUs. False gives the same tokens."
    )
    cuda_graphs: bool | None = Field(None, description="Replay rounds as CUDA graphs; by default on GPUs.")
    threads: int = Field(1, ge=1, description="Torch CPU threads of the verifier, and of the drafter.")
    share_core: bool = Field(
        True,
        description="On CPUs with threads=1, keep verifier and drafter, which take turns, on one core that no other "
        "pair uses, where the machine has one to spare.",
    )
    num_gpus_per_verifier: float = Field(0.0, ge=0, description="GPUs, or a share of one, per verifier.")
    num_gpus_per_drafter: float = Field(0.0, ge=0, description="GPUs, or a share of one, per drafter.")
    num_cpus_per_verifier: float = Field(0.5, ge=0, description="CPUs Ray sets aside per verifier.")
    num_cpus_per_drafter: float = Field(0.3, ge=0, description="CPUs Ray sets aside per drafter.")
    num_cpus_per_router: float = Field(0.1, ge=0, description="CPUs Ray sets aside per router.")

    capture_dir: Path | None = Field(
        None,
        description="Folder for tokens and hidden states of live requests, to train drafters on; none stores nothing.",
    )
    capture_share: float = Field(0.01, gt=0, le=1, description="Share of the requests that are captured.")
    capture_max_bytes: int = Field(10 * 10**9, ge=1, description="Of all captures in capture_dir together.")

    engine_factory: str = Field(
        "wingbeat.deployments.engine_factory:build_engine",
        description="`module:function` from this config to the engine; for engines other than our own.",
    )
    drafter_factory: str = Field(
        "wingbeat.deployments.drafter_factory:build_draft_worker",
        description="`module:function` from this config to the drafter's worker.",
    )

    @field_validator(
        "model",
        "served_model_name",
        "num_replicas",
        "num_kv_blocks",
        "kv_cache_memory_bytes",
        "capture_dir",
        mode="before",
    )
    @classmethod
    def _none_by_word(cls, value: Any) -> Any:
        """The command line has no other way to say null."""
        return None if isinstance(value, str) and value.lower() in ("", "none", "null") else value

    @field_validator("autoscaling_config", "router_autoscaling_config", mode="before")
    @classmethod
    def _json_on_the_command_line(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise ValueError(f'must be a JSON object such as {{"min_replicas": 1}}, got {value!r}') from error

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        """Refuse what no single field can see, naming field, value and what is allowed."""
        self._check_paths()
        if self.num_replicas is not None and self.autoscaling_config is not None:
            raise ValueError(f"num_replicas is {self.num_replicas}: leave it out where autoscaling_config is given")
        if self.device == "cuda" and self.num_gpus_per_verifier == 0:
            raise ValueError("num_gpus_per_verifier is 0: device 'cuda' needs a GPU or a share of one, such as 0.5")
        if self.device == "cpu" and self.num_gpus_per_verifier > 0:
            raise ValueError(f"num_gpus_per_verifier is {self.num_gpus_per_verifier}: device 'cpu' allows only 0")
        if self.device == "cuda" and self._choice().needs_gpu and self.num_gpus_per_drafter == 0:
            raise ValueError("num_gpus_per_drafter is 0: device 'cuda' needs a GPU or a share of one, such as 0.3")
        if self.cuda_graphs and self.resolved_device() == "cpu":
            raise ValueError("cuda_graphs is True: device 'cpu' has none; leave it out")
        for name in ("num_gpus_per_verifier", "num_gpus_per_drafter"):
            check_gpu_amount(name, getattr(self, name))
        if self.resolved_device() == "cpu" and self.num_gpus_per_drafter > 0:
            raise ValueError(
                f"num_gpus_per_drafter is {self.num_gpus_per_drafter}: beside a verifier on the CPU only 0 is allowed"
            )
        if self.has_drafter():
            self.channel_kind()
        for name in ("engine_factory", "drafter_factory"):
            if getattr(self, name).count(":") != 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}: must read module:function")
        self.engine_config()
        return self

    def _check_paths(self) -> None:
        if self.model is not None and not (self.model / "config.json").is_file():
            raise ValueError(f"model is {str(self.model)!r}: must be a directory with a config.json")
        if self.capture_dir is not None and self.capture_dir.exists() and not self.capture_dir.is_dir():
            raise ValueError(f"capture_dir is {str(self.capture_dir)!r}: must be a directory, or not there yet")
        self._choice()

    def _choice(self) -> DrafterChoice:
        return parse_drafter(self.drafter, self.model)

    def engine_config(self) -> EngineConfig:
        """Limits of one engine, as the runtime takes them.

        Raises:
            ValueError: a limit is out of range; names field and value.
        """
        given = {name: value for name in TREE_FIELDS if (value := getattr(self, name)) is not None}
        tree = SpeculationConfig.default(self.resolved_device(), **given)
        limits = {name: getattr(self, name) for name in _ENGINE_LIMITS}
        return EngineConfig(**limits, gpu_share=min(self.num_gpus_per_verifier, 1.0) or 1.0, speculation=tree)

    def resolved_dtype(self) -> str:
        """Name of torch's dtype, `auto` resolved."""
        return resolve_dtype(self.dtype, self.resolved_device())

    def resolved_device(self) -> str:
        """`cpu` or `cuda`."""
        if self.device == "auto":
            return "cuda" if self.num_gpus_per_verifier > 0 else "cpu"
        return self.device

    def shares_core(self) -> bool:
        """Whether the pair's threads are to be kept on one core."""
        return self.share_core and self.resolved_device() == "cpu" and self.threads == 1 and self.has_drafter()

    def drafter_device(self) -> str:
        """`cpu` or `cuda`; kinds that only look tokens up run on the CPU whatever share they have."""
        has_gpu = self.resolved_device() == "cuda" and self.num_gpus_per_drafter > 0
        return "cuda" if has_gpu and self._choice().can_use_gpu else "cpu"

    def channel_kind(self) -> ChannelKind:
        """Kind of channel between verifier and drafter.

        Raises:
            ValueError: the kind asked for needs a GPU that a side does not have; names the side.
        """
        return choose_channel(self.channel, self.resolved_device(), self.drafter_device())

    def has_drafter(self) -> bool:
        """False where every request decodes plainly and no drafter process exists."""
        return self._choice().drafts

    def tests_drafter(self) -> bool:
        """Whether the drafter is tried at the start: one with weights, unless a factory of the user's own builds it."""
        default = type(self).model_fields["drafter_factory"].default
        return self._choice().has_weights and self.drafter_factory == default

    def model_dir(self) -> Path:
        """The verifier's checkpoint.

        Raises:
            FileNotFoundError: none is configured and this installation comes without the demo pair.
        """
        return demo_pair().verifier if self.model is None else self.model

    def drafter_source(self) -> str | Path:
        """What `load_drafter` takes, `auto` resolved."""
        return self._choice().source

    def drafter_name(self) -> str:
        """One word for people to read."""
        return self._choice().label

    def model_name(self) -> str:
        """What clients pass as `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "wingbeat-demo" if self.model is None else self.model.resolve().name
