"""Fields of Ray Serve LLM's `LLMConfig`, as written in YAML, and the handling of each field.

Ray is not imported here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wingbeat.deployments.vllm_words.foreign_rows import Given, Row, Settings, becomes, left_out, refused, renamed

ACCELERATOR, GPU_PART = "accelerator_type", "part of a GPU"
"""Keys of translated values that are not settings: Ray's accelerator type, and the fraction of a GPU (below 1) that a
pair gets.
"""
NESTED = (
    *("model_loading_config", "lora_config", "accelerator_config", "placement_group_config", "experimental_configs"),
    *("deployment_config", "deployment_config.ray_actor_options"),
)
"""Fields of an `LLMConfig` that are objects; the table `LLM_CONFIG` lists the fields of these objects as
`object.field`.
"""
_BUCKETS = ("s3://", "gs://", "abfss://", "azure://")
_NVIDIA = (
    *("A100", "A100-40G", "A100-80G", "A10", "A10G", "B200", "B300", "GB200", "GB300", "H100", "H20", "H200", "K80"),
    *("L4", "L40S", "P100", "P4", "RTX-PRO-6000", "T4", "V100"),
)
_ROUTERS = ("PrefixCacheAffinityRouter", "PowerOfTwoChoicesRequestRouter", "RoundRobinRouter", "KVAwareRouter")
_ALWAYS_SCALES = {"min_replicas": 1, "max_replicas": 100}
"""Ray Serve's autoscaling settings for `num_replicas: auto`."""


def _source(value: Any, given: Given) -> Settings:
    if isinstance(value, Mapping) or str(value).startswith(_BUCKETS):
        raise ValueError("nothing is fetched from buckets: give a folder that every node has, or a hub name, org/name")
    return {"model": str(value)}


def _model_id(value: Any, given: Given) -> Settings:
    named = {"served_model_name": str(value)}
    return named if given.get("model_loading_config.model_source") else named | {"model": str(value)}


def _tokenizer(value: Any, given: Given) -> Settings:
    names = [given.get(f"model_loading_config.{field}") for field in ("model_source", "model_id")]
    if value != (names[0] or names[1]):
        raise ValueError("put its files into the model's folder")
    return {}


def _accelerator(value: Any, given: Given) -> Settings:
    if value not in _NVIDIA:
        raise ValueError(
            f"must be one of {', '.join(_NVIDIA)}; for CPUs, give accelerator_config {{{{kind: cpu}}}} instead"
        )
    return {ACCELERATOR: "A10G" if value == "A10" else value, "device": "cuda"}


def _kind(value: Any, given: Given) -> Settings:
    devices = {"cpu": "cpu", "gpu": "cuda"}
    if value not in devices:
        raise ValueError("must be gpu or cpu")
    return {"device": devices[value]}


def _gpus(amount: Any) -> dict[str, Any]:
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not 0 <= amount <= 1:
        raise ValueError("must be from 0 to 1 GPU: for several GPUs use {tensor_parallel_size}")
    if amount == 0:
        return {"device": "cpu"}
    return {"device": "cuda"} | ({GPU_PART: amount} if amount < 1 else {})


def _bundle(value: Any, given: Given) -> Settings:
    """Reads the resources of each rank of a verifier; a drafter's resources are derived from its settings."""
    if not isinstance(value, Mapping):
        raise ValueError("must be an object, such as {{CPU: 1, GPU: 1}}")
    found = _gpus(value.get("GPU", 0))
    for resource, amount in value.items():
        if resource == "CPU":
            found["num_cpus_per_verifier"] = float(amount)
        elif str(resource).startswith("accelerator_type:"):
            found |= _accelerator(str(resource).partition(":")[2], given)
        elif resource in ("TPU", "memory", "object_store_memory"):
            raise ValueError(
                f"{resource} is no resource of a verifier: give CPU, GPU, accelerator_type:NAME or custom resources"
            )
        elif resource != "GPU":
            found.setdefault("verifier_resources", {})[resource] = amount
    return found


def _bundles(value: Any, given: Given) -> Settings:
    workers = (given.get("engine_kwargs") or {}).get("tensor_parallel_size", 1)
    if not isinstance(value, list) or len(value) != workers or any(bundle != value[0] for bundle in value):
        raise ValueError("must be one bundle for each of {tensor_parallel_size} workers, all equal")
    return _bundle(value[0], given)


def _replicas(value: Any, given: Given) -> Settings:
    return _autoscaling({}, given) if value == "auto" else {"num_replicas": value}


def _autoscaling(value: Any, given: Given) -> Settings:
    said = given.get("deployment_config.autoscaling_config") or {}
    always = given.get("deployment_config.num_replicas") == "auto"
    return {"autoscaling_config": {**_ALWAYS_SCALES, **said} if always else dict(said)}


def _queued(value: Any, given: Given) -> Settings:
    return {} if value == -1 else {"max_queued_requests": value}


def _router_class(value: Any, given: Given) -> Settings:
    asked = value.get("request_router_class") if isinstance(value, Mapping) else value
    if asked is not None and str(asked).replace(":", ".").rpartition(".")[2] not in _ROUTERS:
        raise ValueError("requests are always routed by cached prefixes and free engines; leave it out")
    return {}


def _environment(value: Any, given: Given) -> Settings:
    """Ignores vLLM's environment variables; refuses all other variables, because these must be set in the application's
    runtime_env.
    """
    rest = {key: said for key, said in (value or {}).items() if key != "env_vars" and said}
    for variable in (value or {}).get("env_vars") or {}:
        if not str(variable).startswith(("VLLM_", "RAY_SERVE_LLM_", "RAYLLM_")):
            rest[variable] = ""
    if rest:
        raise ValueError(f"give {', '.join(map(str, rest))} as runtime_env of the application, beside its import_path")
    return {}


def _adapters(value: Any, given: Given) -> Settings:
    """Returns settings for the adapters in a folder: each adapter is named `model_id:adapter`, as in Ray, and the
    folder is also the place for adapters that are loaded later.
    """
    if str(value).startswith(_BUCKETS):
        raise ValueError("nothing is fetched from buckets: copy the adapters to a folder that every node has")
    folder, model_id = Path(str(value)), given.get("model_loading_config.model_id")
    there = sorted(file.parent for file in folder.glob("*/adapter_config.json"))
    named = {f"{model_id}:{one.name}": str(one) for one in there}
    return {"lora_update_dir": str(folder)} | ({"lora_modules": named} if named else {})


_CHECKED = left_out("the health of processes is checked every second")
_DOWNLOADS = left_out("adapters are read from a folder")
_NAMES = left_out("deployments are always named Router, Verifier and DrafterPool")
LLM_CONFIG: dict[str, Row] = {
    "model_loading_config.model_id": becomes("{served_model_name}; {model} too if there is no model_source", _model_id),
    "model_loading_config.model_source": becomes("{model}: a folder or org/name; buckets are refused", _source),
    "model_loading_config.tokenizer_source": becomes("left out if it is the model; else refused", _tokenizer),
    "engine_kwargs": becomes("by the table of vLLM's options; settings of Wingbeat may stand there too", lambda *_: {}),
    "accelerator_type": becomes("{device} cuda, on nodes with that GPU", _accelerator),
    "accelerator_config.kind": becomes("{device}: cpu, or cuda for gpu", _kind),
    "accelerator_config.topology": refused("TPUs are not supported"),
    "placement_group_config.bundle_per_worker": becomes(
        "{num_cpus_per_verifier}, and {device} cuda; part of a GPU is {num_gpus_per_verifier}, or 0.7 of it beside a "
        "drafter with weights, which has the rest; custom resources are {verifier_resources}",
        _bundle,
    ),
    "placement_group_config.bundles": becomes("as bundle_per_worker, if all bundles are equal", _bundles),
    "placement_group_config.strategy": left_out(
        "a verifier's ranks and its drafter are on one node",
        *("PACK", "STRICT_PACK"),
        otherwise="{drafter_resources} puts drafters on other nodes; leave it out",
    ),
    "lora_config.dynamic_lora_loading_path": becomes(
        "{lora_modules}, `model_id:folder` for each adapter there, and {lora_update_dir}; buckets are refused",
        _adapters,
    ),
    "lora_config.max_num_adapters_per_replica": renamed("max_loras"),
    "lora_config.download_timeout_s": _DOWNLOADS,
    "lora_config.max_download_tries": _DOWNLOADS,
    "deployment_config.num_replicas": becomes("{num_replicas}; auto is {autoscaling_config} from 1 to 100", _replicas),
    "deployment_config.autoscaling_config": becomes(
        "{autoscaling_config}, by outstanding tokens: target_ongoing_requests is not read", _autoscaling
    ),
    "deployment_config.max_ongoing_requests": left_out(
        "an engine runs {max_num_seqs} sequences, further requests wait in the router"
    ),
    "deployment_config.max_queued_requests": becomes("{max_queued_requests}; -1 is left out", _queued),
    "deployment_config.graceful_shutdown_timeout_s": renamed("shutdown_timeout_s"),
    "deployment_config.graceful_shutdown_wait_loop_s": _CHECKED,
    "deployment_config.health_check_period_s": _CHECKED,
    "deployment_config.health_check_timeout_s": _CHECKED,
    "deployment_config.ray_actor_options.num_cpus": renamed("num_cpus_per_verifier"),
    "deployment_config.ray_actor_options.num_gpus": becomes(
        "as GPU of bundle_per_worker", lambda value, given: _gpus(value)
    ),
    "deployment_config.ray_actor_options.accelerator_type": becomes("as accelerator_type", _accelerator),
    "deployment_config.ray_actor_options.runtime_env": becomes("as runtime_env", _environment),
    "deployment_config.ray_actor_options.resources": renamed("verifier_resources"),
    "deployment_config.ray_actor_options.memory": refused("{kv_cache_memory_bytes} bounds what an engine takes"),
    "deployment_config.name": _NAMES,
    "deployment_config.user_config": refused("give user_config to the deployments Router and Verifier instead"),
    "deployment_config.logging_config": left_out("{access_log} logs requests; lines are in Ray's logs"),
    "deployment_config.request_router_config": becomes(
        "left out for Ray's routers, as requests are routed by cached prefixes; else refused", _router_class
    ),
    "runtime_env": becomes(
        "vLLM's variables are left out; else refused: give runtime_env of the application", _environment
    ),
    "llm_engine": left_out(
        "the engine is Wingbeat's own", "vLLM", otherwise="the engine is Wingbeat's own; leave it out"
    ),
    "server_cls": refused("the server is Wingbeat's own; leave it out"),
    "callback_config": refused(
        "no callback is called at the start; own code can be given as {drafter}, by import path", {}
    ),
    "log_engine_metrics": left_out("metrics are served at /metrics, and among Ray's metrics as `ray_wingbeat_`"),
    "experimental_configs.stream_batching_interval_ms": renamed("stream_interval_ms"),
    "experimental_configs.num_ingress_replicas": renamed("num_router_replicas"),
}
"""Handling of each field of an `LLMConfig`; fields of the objects in `NESTED` are listed as `object.field`."""

INGRESS: dict[str, Row] = {
    "num_replicas": renamed("num_router_replicas"),
    "autoscaling_config": renamed("router_autoscaling_config"),
    "max_ongoing_requests": renamed("max_ongoing_requests"),
    "max_queued_requests": left_out(
        "routers limit the waiting requests themselves", -1, otherwise="use {max_queued_requests}"
    ),
    "graceful_shutdown_timeout_s": left_out("{shutdown_timeout_s} applies to routers and verifiers"),
    "graceful_shutdown_wait_loop_s": _CHECKED,
    "health_check_period_s": _CHECKED,
    "health_check_timeout_s": _CHECKED,
    "ray_actor_options": left_out("a router always reserves 0.1 CPUs"),
    "name": _NAMES,
    "logging_config": left_out("{access_log} logs requests; lines are in Ray's logs"),
}
"""Handling of each field of `ingress_deployment_config`, whose settings are those of Wingbeat's routers."""
