"""Hooks of the TCP channel between two nodes. Modules are imported only when a hook is called, because commands import
this file.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wingbeat.deployments.app_config import AppConfig
    from wingbeat.deployments.replica.engine.pair_channel import PairChannel
    from wingbeat.runtime.protocol.messages import ChannelSpec

network_channel = "wingbeat.cluster.channels.tcp.remote_channel:RemoteChannel"
drafter_supervisor = "wingbeat.deployments.two_nodes.reconnecting:drafter_supervisor"


def address(config: "AppConfig") -> str | None:
    """Return this node's address if the calling verifier sends its rounds over the network; None if its drafter is on
    the same node.

    Raises:
        RuntimeError: the caller does not run in a placement group.
    """
    from ray.util import get_node_ip_address
    from ray.util.placement_group import get_current_placement_group, placement_group_table

    from wingbeat.cluster.placement import DRAFTER_BUNDLE, node_id

    if not config.has_channel():
        return None
    if config.channel == "remote":
        return get_node_ip_address()
    if not config.may_span_nodes():
        return None
    group = get_current_placement_group()
    if group is None:
        raise RuntimeError("the caller has no placement group")
    is_here = placement_group_table(group)["bundles_to_node_id"][DRAFTER_BUNDLE] == node_id()
    return None if is_here else get_node_ip_address()


def pair_channel(config: "AppConfig", name: str, spec: "ChannelSpec", address: str | None) -> "PairChannel | None":
    """Return the pair's channel if the drafter connects to an address of this node, else None."""
    if address is None:
        return None
    from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel
    from wingbeat.deployments.replica.engine.pair_channel import OWN_DEVICE, PairChannel

    return PairChannel(RemoteChannel(address, spec, OWN_DEVICE if config.resolved_device() == "cuda" else None))
