"""Assignment of GPUs, channel of a pair, and the refusal of what no node can hold."""

import pytest

from wingbeat.cluster.placement import (
    NO_NARROWING,
    Group,
    Share,
    check_gpu_amount,
    check_node_gpus,
    check_room,
    choose_channel,
    gpus_of_pair,
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


@pytest.mark.parametrize(
    ("verifier", "drafter", "expected"),
    [(0.7, 0.3, 1), (1, 1, 2), (0, 0, 0), (1, 0, 1), (0.6, 0.6, 2), (2, 0.5, 3), (0.5, None, 1), (0.1 + 0.2, 0.7, 1)],
)
def test_fractions_share_a_gpu_where_they_fit(verifier: float, drafter: float | None, expected: int):
    assert gpus_of_pair(Share(1, verifier), None if drafter is None else Share(1, drafter)) == expected


def test_every_rank_of_a_verifier_takes_a_gpu_of_its_node():
    assert gpus_of_pair(Share(1, 1), Share(1, 0.3), num_ranks=4) == 5
    check_node_gpus(Share(1, 1), None, [4.0], num_ranks=4)
    with pytest.raises(ValueError, match=r"num_gpus_per_verifier is 1 for each of 4 ranks .*needs 5 GPU"):
        check_node_gpus(Share(1, 1), Share(1, 1), [4.0, 4.0], num_ranks=4)


@pytest.mark.parametrize("amount", [0, 0.3, 1, 2.0])
def test_shares_that_ray_can_assign_pass(amount: float):
    check_gpu_amount("num_gpus_per_verifier", amount)


@pytest.mark.parametrize("amount", [1.5, -0.1])
def test_shares_that_ray_cannot_assign_are_named(amount: float):
    with pytest.raises(ValueError, match=f"num_gpus_per_drafter is {amount}: must be 0, a fraction"):
        check_gpu_amount("num_gpus_per_drafter", amount)


def test_a_pair_that_no_node_can_hold_is_refused_with_both_shares():
    check_node_gpus(Share(1, 0.7), Share(1, 0.3), [0.0, 1.0])
    check_node_gpus(Share(1), Share(1), [])
    with pytest.raises(ValueError, match=r"is 1 and .*drafter is 1: a pair needs 2 GPU\(s\) of one node.* 1 on"):
        check_node_gpus(Share(1, 1), Share(1, 1), [1.0, 1.0])
    with pytest.raises(ValueError, match=r"verifier is 0\.5: a pair needs 1 GPU\(s\) of one node, Ray sees 0"):
        check_node_gpus(Share(1, 0.5), None, [])


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


def test_a_pair_that_may_span_nodes_needs_one_with_each_share():
    check_node_gpus(Share(1, 2), Share(1, 1), [2.0, 1.0], one_node=False)
    with pytest.raises(ValueError, match="a pair needs 3"):
        check_node_gpus(Share(1, 2), Share(1, 1), [2.0, 1.0])
    with pytest.raises(ValueError, match="num_gpus_per_drafter is 4: Ray sees 2 GPUs on the largest node"):
        check_node_gpus(Share(1, 2), Share(1, 4), [2.0, 1.0], one_node=False)


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


PAIR = [{"CPU": 0.5}, {"CPU": 0.3}]
NODES = [{"CPU": 2.0}, {"CPU": 1.0, "cheap_gpu": 1.0}]


@pytest.mark.parametrize(
    ("group", "says"),
    [
        (Group("a pair", [{"CPU": 2.0}, {"CPU": 0.3}]), "a pair takes 2.3 CPU of one node: Ray sees 2 on the largest"),
        (Group("a pair", [{"CPU": 0.5}, {"CPU": 0.3, "dear": 1.0}]), "a pair takes 1 dear of one node: Ray sees 0"),
        (Group("a pair", [{"CPU": 3.0}, {"CPU": 0.3}], one_node=False), "takes 3 CPU of one node: Ray sees 2"),
        (Group("a pair", PAIR, num=4), "4 x a pair: together they take 3.2 CPU, Ray sees 3 in all nodes"),
        (Group("a drafter", [{"CPU": 0.1, "cheap_gpu": 1.0}], num=2), "they take 2 cheap_gpu, Ray sees 1"),
    ],
)
def test_what_the_nodes_cannot_hold_is_refused_by_the_resource(group: Group, says: str):
    with pytest.raises(ValueError, match=says):
        check_room([group], NODES)


def test_groups_that_the_nodes_hold_alone_and_together_are_taken():
    apart = Group("a pair", [{"CPU": 1.5}, {"CPU": 0.3, "cheap_gpu": 1.0}], one_node=False)
    check_room([apart, Group("a router", [{"CPU": 0.1}]), Group("a pair", PAIR)], NODES)
    with pytest.raises(ValueError, match=r"1 x a pair, 2 x a router: together they take 3\.8 CPU"):
        check_room([apart, Group("a router", [{"CPU": 1.0}], num=2)], NODES)
