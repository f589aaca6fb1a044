"""GPUs are found without CUDA: by the driver's library, its device files, or Ray's count."""

from pathlib import Path

import pytest

from tests.cluster import fake_nvml
from tests.cluster.fake_nvml import device
from wingbeat.deployments.gpu_shares.gpus import Gpu, gpus_here, gpus_of_node


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_whose_memory_somebody_uses_is_there_and_not_free(monkeypatch):
    fake_nvml.install(monkeypatch, device(0, used_gib=30), device(1))
    assert gpus_here() == [Gpu("NVIDIA H100", False), Gpu("NVIDIA H100", True)]


@pytest.mark.parametrize(
    ("visible", "free"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1", [True]),
        ("1,0", [True, False]),
        ("GPU-11", [True]),
        ("0,7", [False]),
    ],
)
def test_what_the_environment_hides_is_not_there(monkeypatch, visible, free):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    fake_nvml.install(monkeypatch, device(0, used_gib=30), device(1))
    assert [gpu.free for gpu in gpus_here()] == free


def test_of_gpus_divided_by_mig_a_process_sees_one_instance(monkeypatch):
    fake_nvml.install(monkeypatch, device(0, is_divided=True), device(1, is_divided=True))
    assert gpus_here() == [Gpu("MIG instance")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    fake_nvml.install(monkeypatch, device(0, is_divided=True))
    assert gpus_here() == [Gpu("MIG instance")]


def test_without_the_library_the_drivers_device_files_are_counted(monkeypatch, tmp_path: Path):
    fake_nvml.remove(monkeypatch)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert gpus_here(tmp_path) == [Gpu(), Gpu()]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpus_here(tmp_path) == [Gpu()]
    assert gpus_here(tmp_path / "none") == []


def test_of_a_node_those_are_free_that_ray_has_given_nothing_of():
    resources = {"GPU": 3.0, "accelerator_type:H100": 1.0}
    found = gpus_of_node(resources, {"GPU": 1.3})
    assert [(gpu.name, gpu.free) for gpu in found] == [("H100", True), ("H100", False), ("H100", False)]
    assert gpus_of_node({"CPU": 8.0}, {"CPU": 8.0}) == []
    assert gpus_of_node({"GPU": 1.0, "accelerator_type:X1": 1.0}, {"GPU": 1.0}) == [Gpu("X1", True)]
