"""The configuration: strings of the command line become values, and errors name the setting."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.needs import needs
from wingbeat.deployments.app import _verifier, verifier_names
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.router import access_of
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import FALLBACK
from wingbeat.runtime.kv.pool import LayerAttention, block_bytes, memory_budget

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "serve").glob("*.yaml"))


def test_the_default_is_the_demo_pair_drafting_chains_on_the_cpu():
    config = AppConfig()
    limits = EngineConfig(speculation=SpeculationConfig.default("cpu"), lower_max_model_len=True)
    assert config.engine_config() == limits
    assert (config.resolved_device(), config.has_drafter()) == ("cpu", True)


def test_a_gpu_without_settings_holds_the_longest_sequence_of_a_model_of_8b_parameters(monkeypatch):
    config = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3)
    weights, total = 16 << 30, 80 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (total - weights, total))
    limits = config.engine_config()
    budget = memory_budget(limits, torch.device("cuda"))
    layers = [LayerAttention(32, 8, 128, 128, None)] * 32
    assert budget >= (limits.max_blocks_per_seq + 1) * block_bytes(layers, limits.block_size, torch.bfloat16)
    assert weights + budget <= 0.9 * total


def test_a_round_on_a_gpu_has_more_prompt_tokens_unless_their_number_is_set():
    def tokens(**fields) -> int:
        return AppConfig(**fields).engine_config().max_num_batched_tokens

    on_gpu = {"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3}
    assert (tokens(), tokens(**on_gpu)) == (512, 2048)
    assert tokens(**on_gpu, max_num_batched_tokens=96) == 96


@pytest.mark.parametrize(
    ("shares", "of_gpu", "beside"),
    [
        ((1, 1), 1.0, False),
        ((0.7, 0.3), 1.0, True),
        ((0.4, 0.1), 0.5, True),
        ((1, 0.5), 1.0, False),
        ((1, 0), 1.0, False),
    ],
)
def test_a_pair_on_one_gpu_has_the_shares_of_both(shares, of_gpu, beside):
    verifier, drafter = shares
    kind = "auto" if drafter else FALLBACK.kind
    config = AppConfig(num_gpus_per_verifier=verifier, num_gpus_per_drafter=drafter, drafter=kind)
    limits = config.engine_config()
    assert (limits.gpu_share, limits.drafter_beside) == (of_gpu, beside)


@pytest.mark.parametrize(("positions", "longest"), [(131072, 131072), (64, 64), (None, 2048)])
def test_sequences_are_as_long_as_the_model_has_positions_unless_memory_says_otherwise(tmp_path, positions, longest):
    fields = {} if positions is None else {"max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    limits = AppConfig(model=tmp_path, drafter=FALLBACK.kind).engine_config()
    assert (limits.max_model_len, limits.lower_max_model_len) == (longest, True)
    limits = AppConfig(model=tmp_path, drafter=FALLBACK.kind, max_model_len=50).engine_config()
    assert (limits.max_model_len, limits.lower_max_model_len) == (50, False)


def test_strings_of_the_command_line_become_typed_values():
    config = AppConfig.model_validate(
        {
            "threads": "2",
            "num_kv_blocks": "none",
            "enable_prefix_caching": "false",
            "drafter_timeout_s": "0.5",
            "draft_top_k": "1",
            "autoscaling_config": '{"min_replicas": 1, "max_replicas": 3}',
        }
    )
    assert config.threads == 2
    assert config.autoscaling_config == {"min_replicas": 1, "max_replicas": 3}
    engine = config.engine_config()
    assert (engine.num_kv_blocks, engine.enable_prefix_caching, engine.drafter_timeout_s) == (None, False, 0.5)
    assert engine.speculation.draft_top_k == 1


def test_keys_come_by_setting_or_environment_and_show_nowhere(monkeypatch: pytest.MonkeyPatch):
    assert AppConfig().api_key is None
    monkeypatch.setenv("WINGBEAT_API_KEY", "hidden1,hidden2")
    assert [key.get_secret_value() for key in AppConfig().api_key] == ["hidden1", "hidden2"]
    assert [key.get_secret_value() for key in AppConfig(api_key=["hidden3"]).api_key] == ["hidden3"]
    assert "hidden" not in repr(AppConfig()) + str(access_of(AppConfig(), "0.0.0.0")) + AppConfig().model_dump_json()
    monkeypatch.setenv("WINGBEAT_API_KEY", "")
    assert AppConfig().api_key is None


def test_hosts_and_origins_are_lists_in_the_form_headers_have():
    config = AppConfig(allowed_hosts="Example.org, ::1", allowed_origins="https://App.example/,null")
    assert config.allowed_hosts == ("example.org", "[::1]")
    assert config.allowed_origins == ("https://app.example", "null")


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False)],
)
def test_a_server_on_a_loopback_address_takes_local_names_alone(host: str, local: bool):
    access = access_of(AppConfig(), host)
    assert (access.hosts == {"*"}) != local
    assert access.takes_origin("http://localhost:3000", host) == local
    if local:
        access.check_host(f"[{host}]:80" if ":" in host else host)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "shm"),
        ({"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3}, "cuda_ipc"),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 1}, "cuda_ipc"),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 1, "channel": "shm"}, "shm"),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 0.5, "drafter": "ngram"}, "shm"),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 0.5, "drafter": "suffix"}, "shm"),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 0.5, "drafter": "mtp"}, "cuda_ipc"),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 0.5, "drafter": "some.module.Class"}, "cuda_ipc"),
    ],
    ids=["cpu", "one-gpu", "two-gpus", "asked-for", "prompt-lookup", "suffix", "mtp", "user"],
)
def test_rounds_go_through_gpu_memory_where_both_sides_have_a_gpu(values: dict, kind: str):
    assert AppConfig.model_validate(values).channel_kind() == kind


@pytest.mark.parametrize(
    ("values", "spans", "kinds"),
    [
        ({}, False, ("shm", "remote")),
        ({"drafter_resources": '{"cheap": 1}'}, True, ("shm", "remote")),
        ({"drafter_resources": {"cheap": 1}, "channel": "shm"}, False, ("shm", "shm")),
        ({"channel": "remote"}, True, ("remote", "remote")),
        ({"num_gpus_per_verifier": 1, "num_gpus_per_drafter": 1}, False, ("cuda_ipc", "remote")),
    ],
    ids=["default", "resources", "one-node", "asked-for", "gpus"],
)
def test_a_pair_may_span_two_nodes_where_its_drafter_asks_for_others(values: dict, spans: bool, kinds: tuple):
    config = AppConfig.model_validate(values)
    assert config.may_span_nodes() == spans
    assert (config.channel_kind(one_node=True), config.channel_kind(one_node=False)) == kinds


@needs("tcp")
def test_the_drafter_takes_its_resources_of_its_node():
    share = AppConfig(drafter_resources={"cheap": 0.5}).drafter_share()
    assert share.bundle() == {"CPU": 0.3, "cheap": 0.5}
    assert share.actor_options() == {"num_cpus": 0.3, "num_gpus": 0.0, "resources": {"cheap": 0.5}}


@needs("ranks")
def test_a_verifier_and_each_of_its_ranks_take_their_resources_of_their_node():
    ranks = {"model": "nobody/elsewhere", "drafter": str(demo_pair().drafter), "tensor_parallel_size": 2}
    config = AppConfig(verifier_resources='{"big": 1}', **ranks)
    deployment = _verifier(config)._replica_config
    rank = {"CPU": 0.5, "big": 1.0}
    assert deployment.placement_group_bundles == [rank, {"CPU": 0.3}, rank]
    assert deployment.ray_actor_options["resources"] == {"big": 1.0}
    assert deployment.placement_group_strategy == "STRICT_PACK"


@needs("tcp")
def test_a_pair_of_two_kinds_of_nodes_has_a_bundle_for_each():
    config = AppConfig(verifier_resources={"big": 0.5}, drafter_resources={"cheap": 1})
    deployment = _verifier(config)._replica_config
    assert deployment.placement_group_bundles == [{"CPU": 0.5, "big": 0.5}, {"CPU": 0.3, "cheap": 1.0}]
    assert deployment.placement_group_strategy == "PACK"


@needs("tcp")
def test_a_drafter_that_may_be_elsewhere_has_no_part_in_its_verifiers_gpu():
    shares = {"num_gpus_per_verifier": 0.6, "num_gpus_per_drafter": 0.4}
    beside = AppConfig(**shares).engine_config()
    elsewhere = AppConfig(**shares, drafter_resources={"cheap": 1}).engine_config()
    assert (beside.gpu_share, elsewhere.gpu_share) == (1.0, 0.6)


def test_auto_means_the_fallback_for_a_model_without_a_head(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    config = AppConfig(model=tmp_path)
    assert (config.choice(), config.has_drafter()) == (FALLBACK, FALLBACK.drafts)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_configure_the_application(path: Path, tmp_path: Path):
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text())).applications
    assert application.import_path == "wingbeat.deployments.app:build"
    (tmp_path / "config.json").touch()
    folders = {name: str(tmp_path) for name in ("model", "drafter") if name in application.args}
    AppConfig.model_validate(application.args | folders)


def test_what_decides_the_text_is_told_apart_and_nothing_else(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    own = AppConfig().text_identity()
    assert all(
        AppConfig(**one).text_identity() == own
        for one in ({"drafter": FALLBACK.kind}, {"max_num_seqs": 3}, {"dtype": "float32"}, {"served_model_name": "m"})
    )
    others = [AppConfig(model=str(tmp_path), drafter=FALLBACK.kind), AppConfig(dtype="bfloat16")]
    others += [AppConfig(kv_cache_dtype="fp8"), AppConfig(deterministic=True)]
    assert len({own, *(other.text_identity() for other in others)}) == 5


def test_sequences_at_once_are_left_to_a_gpus_memory_unless_they_are_given():
    gpu = {"num_gpus_per_verifier": 0.7, "num_gpus_per_drafter": 0.3}
    assert [AppConfig(**more).most_num_seqs() for more in ({}, gpu, gpu | {"max_num_seqs": 7})] == [16, 256, 7]
    lowered = [AppConfig(**more).engine_config().lower_max_num_seqs for more in ({}, gpu, gpu | {"max_num_seqs": 7})]
    assert lowered == [False, True, False]
    # The router's question is answered without a check of the other limits against the model's positions.
    assert AppConfig(max_model_len=64, num_kv_blocks=8).most_num_seqs() == 16
    of_another = gpu | {"engine_factory": "module:function"}
    assert AppConfig(**of_another).most_num_seqs() == 16


def test_a_drafter_within_the_engine_takes_no_process_core_share_or_channel():
    gpu = AppConfig(drafter_place="engine", num_gpus_per_verifier=1)
    assert (gpu.drafter_device(), gpu.engine_config().drafter_beside) == ("cuda", True)
    cpu = AppConfig(drafter_place="engine")
    assert (cpu.has_drafter(), cpu.has_own_drafter(), cpu.shares_core()) == (True, False, False)
    with pytest.raises(ValueError, match="drafter_place is engine and channel is cuda_ipc: there is no channel"):
        AppConfig(drafter_place="engine", num_gpus_per_verifier=1, channel="cuda_ipc")


def test_no_validator_takes_the_place_of_another_classs():
    kinds = [kind for kind in AppConfig.__mro__ if "__pydantic_decorators__" in vars(kind)]
    own = [name for kind in kinds for name in kind.__pydantic_decorators__.field_validators if name in vars(kind)]
    assert len(own) > 10
    assert sorted(own) == sorted(set(own))


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser", "otlp_traces_endpoint", "allowed_hosts"])
def test_none_is_nothing(name):
    assert getattr(AppConfig.model_validate({name: "none"}), name) is None


@pytest.mark.parametrize("word", ["none", "None", "null", ""])
def test_a_word_for_nothing_is_nothing_where_a_setting_may_be_none_and_text_elsewhere(word: str):
    config = AppConfig.model_validate(
        dict.fromkeys(("model", "num_replicas", "verifier_resources", "allowed_hosts"), word)
    )
    assert (config.model, config.num_replicas, config.verifier_resources, config.allowed_hosts) == (
        None,
        None,
        None,
        None,
    )
    assert AppConfig(drafter="none").drafter == "none"
    assert word == "" or [key.get_secret_value() for key in AppConfig(api_key=word).api_key] == [word]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 0),
        ({"threads": 3}, 3),
        ({"threads": 0, "num_replicas": 2}, 0),
        ({"num_replicas": 2}, 1),
        ({"num_replicas": 2, "threads": 2}, 2),
        ({"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}}, 1),
        ({"drafters": {"num": 1}}, 1),
    ],
)
def test_threads_are_tried_by_a_pair_that_has_the_machine(given, expected):
    """With several pairs, each would take the threads that all of them share."""
    config = AppConfig(**given)
    assert config.num_threads() == expected
    assert config.shares_core() == (expected == 1 and "drafters" not in given)


@needs("ranks")
def test_each_rank_has_a_thread():
    ranks = AppConfig().model_copy(update={"tensor_parallel_size": 2})
    assert (ranks.num_threads(), ranks.shares_core()) == (1, False)


def test_one_model_is_served_as_it_is():
    config = AppConfig(served_model_name="one")
    assert config.served() == (config,)
    assert verifier_names(config) == ["Verifier"]
