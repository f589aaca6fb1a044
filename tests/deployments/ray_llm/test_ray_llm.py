"""Settings from Ray Serve LLM's YAML, field by field; the examples, and refusals by name."""

import ast
import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application

from tests.needs import needs
from tests.optional import is_gone
from wingbeat.deployments import ray_llm
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.options.problems import SettingsError
from wingbeat.deployments.ray_llm.llm_args import FIELDS
from wingbeat.deployments.ray_llm.llm_config import INGRESS, LLM_CONFIG, NESTED
from wingbeat.deployments.vllm_words.foreign_rows import written

ROOT = Path(__file__).parents[3]
MODEL, HEAD = (str(ROOT / "examples" / "demo_pair" / name) for name in ("verifier", "drafter"))
EXAMPLES = [path for path in sorted((ROOT / "examples" / "ray_llm").glob("*.yaml")) if not is_gone(path.read_text())]
CONFIG: dict[str, Any] = {
    "model_loading_config": {"model_id": "demo", "model_source": MODEL},
    "accelerator_config": {"kind": "cpu"},
}


def settings(*, beside: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Settings that a model with these fields sets, without those of `CONFIG`."""
    config, _, _ = ray_llm.settings_of({"llm_configs": [{**CONFIG, **fields}], **(beside or {})})
    found = {name: getattr(config, name) for name in config.model_fields_set}
    assert found.pop("served_model_name") == "demo"
    assert found.pop("model") == Path(MODEL)
    return found


def test_a_whole_config_becomes_settings() -> None:
    found = settings(
        engine_kwargs={
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "dtype": "float",
            "speculative_config": {"method": "eagle3", "model": HEAD, "num_speculative_tokens": 3},
            "adaptive": False,
        },
        deployment_config={
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
            "max_queued_requests": 9,
            "ray_actor_options": {"num_cpus": 1},
        },
        experimental_configs={"stream_batching_interval_ms": 50, "num_ingress_replicas": 2},
        beside={"ingress_deployment_config": {"max_ongoing_requests": 7}},
    )
    assert found == {
        "device": "cpu",
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "dtype": "float32",
        "drafter": HEAD,
        "draft_steps": 3,
        "adaptive": False,
        "autoscaling_config": {"min_replicas": 1, "max_replicas": 2},
        "max_queued_requests": 9,
        "num_cpus_per_verifier": 1.0,
        "stream_interval_ms": 50.0,
        "num_router_replicas": 2,
        "max_ongoing_requests": 7,
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"deployment_config": {"num_replicas": 3}}, {"num_replicas": 3}),
        (
            {"deployment_config": {"num_replicas": "auto", "autoscaling_config": {"max_replicas": 4}}},
            {"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
        ),
        ({"deployment_config": {"graceful_shutdown_timeout_s": 9}}, {"shutdown_timeout_s": 9}),
        ({"deployment_config": {"max_queued_requests": -1, "max_ongoing_requests": 5}}, {}),
        ({"deployment_config": {"request_router_config": {"request_router_class": "a.b.RoundRobinRouter"}}}, {}),
        ({"placement_group_config": {"bundle_per_worker": {"CPU": 2}}}, {"num_cpus_per_verifier": 2.0}),
        ({"placement_group_config": {"bundles": [{"CPU": 2}], "strategy": "PACK"}}, {"num_cpus_per_verifier": 2.0}),
        ({"engine_kwargs": '{"max_num_seqs": 4}'}, {"max_num_seqs": 4}),
        ({"engine_kwargs": {"speculative_config": '{"method": "ngram"}'}}, {"drafter": "ngram"}),
        ({"runtime_env": {"env_vars": {"VLLM_USE_V1": "1"}}, "llm_engine": "vLLM", "log_engine_metrics": False}, {}),
        ({"callback_config": {}, "server_cls": None, "lora_config": None}, {}),
        ({"model_loading_config": {"model_id": "demo", "model_source": MODEL, "tokenizer_source": MODEL}}, {}),
    ],
    ids=str,
)
def test_fields_become_settings(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert settings(**fields) == {"device": "cpu", **expected}


def on_a_gpu(**fields: Any) -> tuple[dict[str, Any], list[str | None]]:
    config, kind, _ = ray_llm.settings_of({"llm_configs": [{**CONFIG, "accelerator_config": None, **fields}]})
    return {name: getattr(config, name) for name in config.model_fields_set - {"served_model_name", "model"}}, kind


def test_a_kind_of_gpu_is_where_pairs_are_placed() -> None:
    assert on_a_gpu(accelerator_type="A10") == ({"device": "cuda"}, ["A10G"])
    bundle = {"GPU": 1, "accelerator_type:L4": 0.001}
    assert on_a_gpu(placement_group_config={"bundle_per_worker": bundle}) == ({"device": "cuda"}, ["L4"])


@pytest.mark.parametrize(("drafter", "shares"), [(HEAD, (0.35, 0.15)), ("ngram", (0.5, 0.0))])
def test_part_of_a_gpu_is_shared_with_a_drafter_that_has_weights(drafter: str, shares: tuple[float, float]) -> None:
    found, _ = on_a_gpu(placement_group_config={"bundle_per_worker": {"GPU": 0.5}}, engine_kwargs={"drafter": drafter})
    assert (found["num_gpus_per_verifier"], found["num_gpus_per_drafter"]) == pytest.approx(shares)


@needs("lora")
def test_adapters_of_a_folder_have_the_names_that_clients_of_ray_give(tmp_path: Path) -> None:
    adapter = tmp_path / "sql"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}'
    )
    lora = {"dynamic_lora_loading_path": str(tmp_path), "max_num_adapters_per_replica": 16, "max_download_tries": 2}
    found = settings(lora_config=lora, engine_kwargs={"enable_lora": True, "max_loras": 16, "max_lora_rank": 32})
    assert found == {
        "device": "cpu",
        "lora_modules": {"demo:sql": adapter},
        "lora_update_dir": tmp_path,
        "max_loras": 16,
        "max_lora_rank": 32,
    }


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"server_cls": "my:Server"}, "server_cls my:Server: the server is Wingbeat's own; leave it out"),
        ({"llm_engine": "SGLang"}, "llm_engine SGLang: the engine is Wingbeat's own; leave it out"),
        ({"acelerator_type": "L4"}, "acelerator_type is unknown: did you mean llm_configs[0].accelerator_type?"),
        ({"accelerator_type": "TPU-V6E"}, "accelerator_type TPU-V6E: must be one of A100"),
        ({"accelerator_type": "L4"}, "for device: give one of them"),
        ({"accelerator_config": {"kind": "tpu"}}, "accelerator_config.kind tpu: must be gpu or cpu"),
        ({"model_loading_config": {"model_source": MODEL}}, "model_loading_config.model_id must be given"),
        ({"model_loading_config": {"model_id": "d", "model_source": {"bucket_uri": "s3://b"}}}, "give a folder that"),
        ({"model_loading_config": {"model_id": "d", "model_source": "gs://b/m"}}, "nothing is fetched from buckets"),
        (
            {"model_loading_config": {"model_id": "d", "model_source": MODEL, "tokenizer_source": "org/other"}},
            "tokenizer_source org/other: put its files into the model's folder",
        ),
        ({"lora_config": {"dynamic_lora_loading_path": "s3://b"}}, "copy the adapters to a folder"),
        ({"engine_kwargs": {"enable_lora": True}}, "engine_kwargs.enable_lora True: give lora_modules, or lora_update"),
        ({"engine_kwargs": {"trust_remote_code": True}}, "engine_kwargs.trust_remote_code True: code of a checkpoint"),
        ({"engine_kwargs": {"pipeline_parallel_size": 2}}, "engine_kwargs.pipeline_parallel_size 2: use tensor_par"),
        ({"engine_kwargs": {"kv_transfer_config": {"kv_connector": "X"}}}, "engine_kwargs.kv_transfer_config"),
        ({"engine_kwargs": {"speculative_config": {"method": "medusa"}}}, "speculative_config.method medusa: there is"),
        (
            {"engine_kwargs": {"max_nun_seqs": 2}},
            "engine_kwargs.max_nun_seqs is unknown: did you mean engine_kwargs.max",
        ),
        ({"engine_kwargs": {"max_num_seqs": "many"}}, "max_num_seqs many: input should be a valid integer"),
        ({"engine_kwargs": {"model": "other"}}, "model is given twice"),
        ({"engine_kwargs": 3}, "engine_kwargs is 3: must be an object"),
        ({"placement_group_config": {"strategy": "SPREAD"}}, "strategy SPREAD: drafter_resources puts drafters"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}] * 2}}, "one bundle for each of tensor_parallel_size"),
        ({"placement_group_config": {"bundle_per_worker": {"TPU": 4}}}, "TPU is no resource of a verifier"),
        ({"deployment_config": {"user_config": {"a": 1}}}, "deployment_config.user_config"),
        ({"deployment_config": {"request_router_config": {"request_router_class": "my:Router"}}}, "leave it out"),
        (
            {"deployment_config": {"autoscaling_config": {"max_replica": 2}}},
            "'max_replica' is not a field of Ray Serve's",
        ),
        ({"runtime_env": {"env_vars": {"HF_TOKEN": "x"}}}, "give HF_TOKEN as runtime_env of the application"),
        ({"runtime_env": {"pip": ["x"]}}, "give pip as runtime_env of the application"),
        ({"callback_config": {"callback_class": "a.B"}}, "no callback is called at the start"),
        ({"experimental_configs": {"num_router_replicas": 2}}, "experimental_configs.num_router_replicas is unknown"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        ray_llm.build_openai_app({"llm_configs": [{**CONFIG, **fields}]})
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, "llm_configs must be a list with at least one model"),
        ({"llm_configs": []}, "llm_configs must be a list with at least one model"),
        ({"llm_configs": [CONFIG, CONFIG]}, "two models have the name 'demo'"),
        ({"llm_configs": [CONFIG, {"x": 1, **CONFIG}]}, "llm_configs[1].x"),
        ({"llm_configs": [CONFIG, {}]}, "llm_configs[1].model_loading_config.model_id must be given"),
        (
            {"llm_configs": [CONFIG], "ingress_cls_config": {"ingress_cls": "a.B"}},
            "ingress_cls_config is not supported",
        ),
        ({"llm_configs": [CONFIG], "x": 1}, "x is unknown: the fields are llm_configs"),
        ({"llm_configs": [CONFIG], "ingress_deployment_config": {"user_config": 1}}, "ingress_deployment_config.user"),
        ({"llm_configs": ["no/such.yaml"]}, "llm_configs[0] is no/such.yaml: must be an object, an existing YAML"),
        ({"llm_configs": ["{"]}, "llm_configs[0] is not valid YAML"),
        (7, "args is 7: must be an object"),
    ],
    ids=str,
)
def test_arguments_that_are_none_are_one_line(args: Any, line: str) -> None:
    with pytest.raises(SettingsError) as refused:
        ray_llm.build_openai_app(args)
    assert line in str(refused.value)


class Dumped:
    """A stand-in for Ray's `LLMConfig`, a pydantic model."""

    def model_dump(self, exclude_unset: bool) -> dict[str, Any]:
        assert exclude_unset
        return copy.deepcopy(CONFIG)


def test_a_model_may_be_an_object_a_file_text_or_rays_own_config(tmp_path: Path) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    forms = (CONFIG, str(file), yaml.safe_dump(CONFIG), Dumped())
    found = [ray_llm.settings_of({"llm_configs": [form]}) for form in forms]
    assert all(one == found[0] for one in found)
    assert ray_llm.settings_of(yaml.safe_dump({"llm_configs": [CONFIG]})) == found[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_read(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text().replace("/adapters", str(tmp_path))
    for application in yaml.safe_load(text)["applications"]:
        assert application["import_path"] == "wingbeat.deployments.ray_llm:build_openai_app"
        assert application["args"].keys() <= set(FIELDS)
        config, kinds, _ = ray_llm.settings_of(application["args"])
        if all(one.device == "cpu" for one in config.served()):
            assert isinstance(ray_llm.build_openai_app(application["args"]), Application)
        assert kinds == (["L4"] if path.stem == "autoscaling" else [None] * len(kinds))
        assert all(one.has_drafter() for one in config.served())


def test_several_models_are_several_and_what_routers_have_is_common() -> None:
    other = {
        "model_loading_config": {"model_id": "other", "model_source": MODEL},
        "accelerator_type": "L4",
        "deployment_config": {"graceful_shutdown_timeout_s": 9},
    }
    config, kinds, _ = ray_llm.settings_of(
        {"llm_configs": [CONFIG, other], "ingress_deployment_config": {"num_replicas": 2}}
    )
    assert [(one.model_name(), one.device) for one in config.served()] == [("demo", "cpu"), ("other", "cuda")]
    assert kinds == [None, "L4"]
    assert (config.num_router_replicas, config.shutdown_timeout_s) == (2, 9)


def test_an_accelerator_is_a_resource_of_the_verifiers_bundle() -> None:
    app = ray_llm.build_placed(ray_llm.settings_of({"llm_configs": [CONFIG]})[0], ["L4"])
    verifier = app._bound_deployment.init_args[1][0]._bound_deployment
    bundles = verifier._replica_config.placement_group_bundles
    assert bundles[0]["accelerator_type:L4"] == pytest.approx(0.001)
    assert all("accelerator_type:L4" not in bundle for bundle in bundles[1:])


def test_custom_resources_of_an_llm_config_place_its_verifiers() -> None:
    for fields in (
        {"placement_group_config": {"bundle_per_worker": {"CPU": 1, "big": 2}}},
        {"deployment_config": {"ray_actor_options": {"resources": {"big": 2}}}},
    ):
        assert settings(**fields)["verifier_resources"] == {"big": 2.0}


def rays_classes(file: str, *names: str) -> dict[str, set[str]]:
    """By class, the fields of Ray's own models, read from their source: they cannot be imported without vLLM."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "llm" / "_internal" / "serve" / "core" / file).read_text())
    return {
        node.name: {
            line.target.id
            for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_"
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in names
    }


def test_every_field_of_rays_own_models_is_in_the_table() -> None:
    found = rays_classes("configs/llm_config.py", "LLMConfig", "ModelLoadingConfig", "LoraConfig")
    tops = {name.partition(".")[0] for name in LLM_CONFIG}
    assert found["LLMConfig"] <= tops
    assert found["LLMConfig"] >= {name.partition(".")[0] for name in NESTED}
    for place, model in (("model_loading_config", "ModelLoadingConfig"), ("lora_config", "LoraConfig")):
        assert {f"{place}.{field}" for field in found[model]} == {
            name for name in LLM_CONFIG if name.startswith(f"{place}.")
        }
    (arguments,) = rays_classes("ingress/builder.py", "LLMServingArgs").values()
    assert arguments == set(FIELDS)


@pytest.mark.parametrize("table", [LLM_CONFIG, INGRESS], ids=["llm_config", "ingress"])
def test_lines_of_the_tables_name_settings(table: dict[str, Any]) -> None:
    named: list[str] = []
    for row in table.values():
        written(row.description, lambda name: named.append(name) or name)
    assert set(named) <= set(AppConfig.model_fields)
