"""Words about a driver that torch sees no GPU by."""

import pytest

from tests.cluster import fake_nvml
from wingbeat.cluster.gpu_driver import driver_problem, unseen_gpus


@pytest.fixture(autouse=True)
def all_are_visible(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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
