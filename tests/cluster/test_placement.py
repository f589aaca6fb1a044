"""Assignment of GPUs, and the channel of a pair."""

import pytest

from wingbeat.cluster.placement import (
    NO_NARROWING,
    Share,
    check_gpu_amount,
    choose_channel,
    own_devices_first,
    pair_bundles,
)


@pytest.mark.parametrize(
    ("assigned", "visible", "num_devices", "expected"),
    [
        ([0], None, 1, "0"),
        ([2], None, 4, "2,0,1,3"),
        (["3"], "1,3", 0, "3,1"),
        ([1, 3], None, 4, "1,3,0,2"),
        (["GPU-b"], "GPU-a, GPU-b", 0, "GPU-b,GPU-a"),
        (["1"], "1", 0, "1"),
    ],
    ids=["one", "of-four", "operator-narrowed", "two-of-four", "by-uuid", "ray-narrowed"],
)
def test_an_actors_own_gpus_come_first_and_none_is_hidden(assigned, visible, num_devices, expected):
    assert own_devices_first(assigned, visible, num_devices) == expected


def test_a_gpu_that_the_process_cannot_see_is_named():
    with pytest.raises(ValueError, match=r"Ray assigned GPU 5.*\['0', '1'\]"):
        own_devices_first([5], "0,1", 0)


def test_only_actors_with_a_gpu_see_every_gpu():
    assert Share(1.0, 0.3).env_vars() == {NO_NARROWING: "1"}
    assert Share(1.0).env_vars() == {}


@pytest.mark.parametrize("amount", [0, 0.3, 1, 2.0])
def test_shares_that_ray_can_assign_pass(amount: float):
    check_gpu_amount("num_gpus_per_verifier", amount)


@pytest.mark.parametrize("amount", [1.5, -0.1])
def test_shares_that_ray_cannot_assign_are_named(amount: float):
    with pytest.raises(ValueError, match=f"num_gpus_per_drafter is {amount}: must be 0, a fraction"):
        check_gpu_amount("num_gpus_per_drafter", amount)


@pytest.mark.parametrize(
    ("requested", "verifier", "drafter", "expected"),
    [
        ("auto", "cuda", "cuda", "cuda_ipc"),
        ("auto", "cuda", "cpu", "shm"),
        ("auto", "cpu", "cpu", "shm"),
        ("shm", "cuda", "cuda", "shm"),
        ("cuda_ipc", "cuda", "cuda", "cuda_ipc"),
    ],
)
def test_auto_takes_gpu_memory_where_both_sides_have_a_gpu(requested, verifier, drafter, expected):
    assert choose_channel(requested, verifier, drafter) == expected


def test_cuda_ipc_without_gpus_names_the_side_that_lacks_one():
    with pytest.raises(ValueError, match="channel is 'cuda_ipc': both sides need a GPU, the drafter is on cpu; use"):
        choose_channel("cuda_ipc", "cuda", "cpu")
    with pytest.raises(ValueError, match="the verifier is on cpu and the drafter is on cpu"):
        choose_channel("cuda_ipc", "cpu", "cpu")


def test_a_pair_takes_two_bundles_and_a_verifier_alone_takes_one():
    verifier, drafter = Share(0.5, 0.7), Share(0.3)
    assert pair_bundles(verifier, drafter) == [{"CPU": 0.5, "GPU": 0.7}, {"CPU": 0.3}]
    assert pair_bundles(verifier, None) == [{"CPU": 0.5, "GPU": 0.7}]
    assert pair_bundles(drafter, verifier, num_ranks=3) == [
        drafter.bundle(),
        verifier.bundle(),
        *[drafter.bundle()] * 2,
    ]
    assert Share(0.0).bundle() == {"CPU": 0.001}
    assert Share(0.0).actor_options() == {"num_cpus": 0.001, "num_gpus": 0.0}
