"""Refusal of what no node, and what the cluster, can hold."""

import pytest

from wingbeat.cluster.placement import Share
from wingbeat.deployments import launch
from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.launch import ServedApplication, StartError
from wingbeat.deployments.parts import hooks
from wingbeat.deployments.start_checks import room
from wingbeat.deployments.start_checks.room import Group, check_node_gpus, check_room, gpus_of_pair

ON_GPU = AppConfig(num_gpus_per_verifier=0.7, num_gpus_per_drafter=0.3)


def test_a_pair_that_fits_no_node_ends_the_start_before_anything_is_deployed(fake_ray, monkeypatch):
    fake = fake_ray()
    monkeypatch.setattr(launch, "hooks", lambda name: hooks(name) if name == "check_in_cluster" else ())
    monkeypatch.setattr(room, "node_gpus", lambda: [0.0])
    with pytest.raises(StartError, match=r"per_verifier is 0\.7 and .* is 0\.3: a pair needs 1 GPU\(s\)"):
        ServedApplication(ON_GPU).start()
    assert "run" not in fake.calls


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


def test_a_pair_that_no_node_can_hold_is_refused_with_both_shares():
    check_node_gpus(Share(1, 0.7), Share(1, 0.3), [0.0, 1.0])
    check_node_gpus(Share(1), Share(1), [])
    with pytest.raises(ValueError, match=r"is 1 and .*drafter is 1: a pair needs 2 GPU\(s\) of one node.* 1 on"):
        check_node_gpus(Share(1, 1), Share(1, 1), [1.0, 1.0])
    with pytest.raises(ValueError, match=r"verifier is 0\.5: a pair needs 1 GPU\(s\) of one node, Ray sees 0"):
        check_node_gpus(Share(1, 0.5), None, [])


def test_a_pair_that_may_span_nodes_needs_one_with_each_share():
    check_node_gpus(Share(1, 2), Share(1, 1), [2.0, 1.0], one_node=False)
    with pytest.raises(ValueError, match="a pair needs 3"):
        check_node_gpus(Share(1, 2), Share(1, 1), [2.0, 1.0])
    with pytest.raises(ValueError, match="num_gpus_per_drafter is 4: Ray sees 2 GPUs on the largest node"):
        check_node_gpus(Share(1, 2), Share(1, 4), [2.0, 1.0], one_node=False)


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
