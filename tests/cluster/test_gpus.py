"""Which GPUs a start finds, without CUDA: by the driver's library, its device files, or Ray's count."""

from pathlib import Path

import pytest

from tests.cluster import fake_nvml
from tests.cluster.fake_nvml import GIB, device
from wingbeat.cluster.gpus import Gpu, driver_problem, gpus_here, gpus_of_node, unseen_gpus


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_gpu_whose_memory_somebody_uses_is_there_and_not_free(monkeypatch):
    fake_nvml.install(monkeypatch, device(0, used_gib=30), device(1))
    assert gpus_here() == [Gpu("NVIDIA H100", 80 * GIB, False), Gpu("NVIDIA H100", 80 * GIB, True)]


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
    assert found[0].total_bytes == 80 * GIB
    assert gpus_of_node({"CPU": 8.0}, {"CPU": 8.0}) == []
    assert gpus_of_node({"GPU": 1.0, "accelerator_type:X1": 1.0}, {"GPU": 1.0}) == [Gpu("X1", None, True)]


@pytest.mark.parametrize(
    ("torch_version", "cuda", "driver", "words"),
    [
        (
            "2.13.0+cu130",
            "13.0",
            "550.54.14",
            ("driver is 550.54.14", "needs driver 580", "update the driver", "cu126"),
        ),
        ("2.13.0+cu126", "12.6", "470.82.01", ("driver is 470.82.01", "needs driver 525", "update the driver")),
        (
            "2.13.0+cu130",
            "13.0",
            "580.65.06",
            ("the driver is 580.65.06", "needs driver 580", "CUDA_VISIBLE_DEVICES is None"),
        ),
        ("2.13.0+cpu", None, "580.65.06", ("torch 2.13.0+cpu is built without CUDA",)),
    ],
)
def test_a_driver_that_is_too_old_is_named_beside_the_one_that_torch_needs(
    monkeypatch, torch_version, cuda, driver, words
):
    fake_nvml.install(monkeypatch, driver=driver)
    said = driver_problem(torch_version, cuda)
    assert all(word in said for word in words)
    assert "\n" not in said


def test_a_driver_that_does_not_answer_is_said_with_its_own_reason(monkeypatch):
    fake_nvml.remove(monkeypatch)
    assert "does not answer (NVML Shared Library Not Found)" in driver_problem("2.13.0+cu130", "13.0")
    assert unseen_gpus("2.13.0+cu130", "13.0") is None
