"""GPU shares that an application takes where its settings leave them open, and the lines that report them."""

import json
from pathlib import Path

import pytest

from wingbeat.deployments import app, launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.cli import main as cli
from wingbeat.deployments.gpu_shares import shares
from wingbeat.deployments.gpu_shares.gpus import Gpu
from wingbeat.deployments.gpu_shares.shares import Placed, with_shares
from wingbeat.deployments.launch import ServedApplication
from wingbeat.deployments.options.problems import SettingsError
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.start_up import StartUp
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.drafters.choice import FALLBACK

FREE, BUSY = Gpu("H100"), Gpu("H100", free=False)


def taken_by(placed: Placed) -> tuple[float, float, str]:
    config = placed.config
    return config.num_gpus_per_verifier, config.num_gpus_per_drafter, config.resolved_device()


@pytest.fixture
def divisible(tmp_path: Path) -> dict[str, Path]:
    """A model that two ranks may share, and its head."""
    for name in ("model", "head"):
        (tmp_path / name).mkdir()
        fields = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64}
        (tmp_path / name / "config.json").write_text(json.dumps(fields | {"vocab_size": 64}))
    return {"model": tmp_path / "model", "drafter": str(tmp_path / "head")}


@pytest.mark.parametrize(
    ("nodes", "values", "taken"),
    [
        ([[]], {}, (0, 0, "cpu")),
        ([[FREE]], {}, (0.7, 0.3, "cuda")),
        ([[FREE, FREE]], {}, (1, 1, "cuda")),
        ([[FREE, BUSY]], {}, (0.7, 0.3, "cuda")),
        ([[BUSY, BUSY]], {}, (0.7, 0.3, "cuda")),
        ([[FREE], [FREE]], {}, (0.7, 0.3, "cuda")),
        ([[FREE]], {"drafter": "ngram"}, (1, 0, "cuda")),
        ([[FREE]], {"drafter_place": "engine"}, (1, 0, "cuda")),
        ([[FREE]], {"device": "cuda"}, (0.7, 0.3, "cuda")),
        ([[FREE]], {"device": "cpu"}, (0, 0, "cpu")),
        ([[FREE]], {"num_gpus_per_verifier": 0}, (0, 0, "cpu")),
        ([[FREE, FREE]], {"num_gpus_per_verifier": 0.5, "num_gpus_per_drafter": 0.2}, (0.5, 0.2, "cuda")),
        ([[FREE, FREE]], {"num_replicas": 2}, (0.7, 0.3, "cuda")),
        ([[FREE] * 4], {"num_replicas": 2}, (1, 1, "cuda")),
        ([[FREE] * 3], {"tensor_parallel_size": 2}, (1, 1, "cuda")),
        ([[FREE] * 2], {"tensor_parallel_size": 2, "drafter": "ngram"}, (1, 0, "cuda")),
        ([[FREE] * 2], {"drafters": {"num": 1}}, (1, 1, "cuda")),
        ([[FREE]], {"drafters": {"num": 1}}, (0.7, 0.3, "cuda")),
        ([[FREE], [FREE]], {"drafter_resources": {"cheap": 1}}, (1, 1, "cuda")),
        ([[FREE]], {"engine_factory": "a:b"}, (0, 0, "cpu")),
    ],
)
def test_a_pair_takes_two_gpus_where_they_are_free_else_one_and_only_what_is_left_open(nodes, values, taken, divisible):
    values = divisible | values if "tensor_parallel_size" in values else values
    placed = with_shares(AppConfig(**values), nodes)
    assert taken_by(placed) == taken
    left_open = AppConfig(**values).leaves_gpus_open()
    assert (placed.line is not None) == (left_open and taken[2] == "cuda")
    assert not placed.config.leaves_gpus_open() or not left_open


@pytest.mark.parametrize(
    ("nodes", "values"),
    [
        ([[FREE]], {"num_replicas": 2}),
        ([[FREE] * 2], {"tensor_parallel_size": 2}),
        ([[FREE]], {"drafters": {"num": 2}}),
    ],
)
def test_fewer_gpus_than_the_settings_need_are_refused_by_what_to_change(nodes, values, divisible):
    values = divisible | values if "tensor_parallel_size" in values else values
    with pytest.raises(SettingsError, match=r"num_gpus_per_verifier is not given.* or use device cpu"):
        with_shares(AppConfig(**values), nodes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device": "cuda"}, "num_gpus_per_verifier is 0"),
        ({"cuda_graphs": True}, "cuda_graphs is True"),
        ({"channel": "cuda_ipc"}, "channel is 'cuda_ipc': both sides need a GPU, the verifier is on cpu"),
    ],
)
def test_what_needs_a_gpu_is_refused_once_it_is_known_that_there_is_none(values, message):
    config = AppConfig(**values)
    assert taken_by(with_shares(config, [[FREE]]))[2] == "cuda"
    with pytest.raises(SettingsError, match=message):
        with_shares(config, [[]])


def test_what_else_is_set_stays_as_it_was():
    values = {"api_key": "hidden", "verifier_resources": '{"big": 1}', "allowed_hosts": "a.example", "threads": 2}
    placed = with_shares(AppConfig(**values), [[FREE, FREE]]).config
    assert placed.model_copy(update={"num_gpus_per_verifier": 0.0, "num_gpus_per_drafter": 0.0}) == AppConfig(**values)


def test_the_command_takes_a_gpu_of_this_machine_and_says_so_in_one_line(monkeypatch, capsys):
    seen: list[AppConfig] = []

    def check(config: AppConfig, *where: object) -> None:
        seen.append(config)
        raise ValueError("as far as it goes")

    monkeypatch.setattr(cli, "hooks", lambda name: (check,) if name == "check_start" else hooks(name))
    monkeypatch.setattr(cli, "_joins_cluster", lambda: False)
    monkeypatch.setattr(shares, "gpus_here", lambda: [FREE])
    for more in ([], ["--device", "cpu"], ["--address", "auto"]):
        with pytest.raises(SystemExit):
            cli.main(["serve", str(demo_pair().verifier), str(demo_pair().drafter), *more])
    assert [config.num_gpus_per_verifier for config in seen] == [0.7, 0, 0]
    assert [config.leaves_gpus_open() for config in seen] == [False, False, True]
    said = capsys.readouterr().out
    assert said.count("Taking 0.7 of a GPU for the verifier and 0.3 for the drafter: 1 of 1 free here (H100)") == 1


@pytest.mark.parametrize("connected", [True, False])
def test_the_application_of_python_and_of_serves_files_takes_them_too(monkeypatch, connected):
    built: list[AppConfig] = []
    monkeypatch.setattr(app.ray, "is_initialized", lambda: connected)
    monkeypatch.setattr(shares, "gpus_here", lambda: [] if connected else [FREE])
    monkeypatch.setattr(shares, "gpus_of_cluster", lambda: [[FREE, FREE]])
    monkeypatch.setattr(app, "build_at", lambda config, *where: built.append(config))
    app.build({})
    app.build(AppConfig(drafter=FALLBACK.kind))
    app.build({"num_gpus_per_verifier": 0})
    expected = [(1, 1), (1, 0), (0, 0)] if connected else [(0.7, 0.3), (1, 0), (0, 0)]
    assert [(config.num_gpus_per_verifier, config.num_gpus_per_drafter) for config in built] == expected


def test_shares_left_open_are_taken_of_the_gpus_that_ray_counts_and_said_in_one_line(fake_ray, monkeypatch):
    fake = fake_ray()
    monkeypatch.setattr(launch, "hooks", lambda name: hooks(name) if name == "take_gpus" else ())
    monkeypatch.setattr(shares, "gpus_of_cluster", lambda: [[], [FREE]])
    monkeypatch.setattr(launch, "build_at", lambda config, door: config)
    output, start_up = [], StartUp()
    monkeypatch.setattr(start_up, "write", output.append)
    ServedApplication(AppConfig(), start_up=start_up).start()
    assert taken_by(Placed(fake.application, None)) == (0.7, 0.3, "cuda")
    assert "\n".join(output).count("aking 0.7 of a GPU for the verifier and 0.3 for the drafter") == 1
