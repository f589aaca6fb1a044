"""Saved prefixes of several models behind one endpoint."""

from tests.deployments.prefixes.prefix_pool import PrefixPool
from tests.deployments.several_models.test_several_at_http import World


def test_prefixes_are_listed_together_and_deleted_where_they_are():
    world = World(PrefixPool)
    for model in ("demo", "other"):
        body = {"model": model, "name": f"of-{model}", "prompt": "hello"}
        assert world.ask("/v1/prefixes", body).json()["model"] == model
    assert [card["name"] for card in world.ask("/v1/prefixes").json()["data"]] == ["of-demo", "of-other"]
    assert world.ask("/v1/prefixes/of-other", method="DELETE").json()["deleted"]
    assert [card["name"] for card in world.ask("/v1/prefixes").json()["data"]] == ["of-demo"]
    assert world.ask("/v1/prefixes/of-demo?model=other", method="DELETE").status_code == 404
