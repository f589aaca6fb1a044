"""Translates methods of SkyRL's worker extension for vLLM, which SkyRL's client calls through `/collective_rpc`, to
verbs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Verb(NamedTuple):
    """Verb that is run in place of a method of SkyRL."""

    name: str
    fields: Mapping[str, Any] = {}
    """Fields of the verb that are set in addition to the method's arguments."""
    dropped: frozenset[str] = frozenset()
    """Arguments of the method that are ignored."""


# Requests that run when SkyRL pauses are kept during the sleep and prefilled again afterwards. So no keys and values
# are saved, and `offload_kv` is ignored.
_METHODS = {
    "skyrl_start_weight_update": _Verb("start_weight_update"),
    "update_weights_nccl": _Verb("update_weights"),
    "skyrl_finish_weight_update": _Verb("finish_weight_update"),
    "skyrl_sleep_for_weight_sync": _Verb("sleep", {"level": 2, "mode": "keep"}, frozenset({"offload_kv"})),
    "skyrl_wake_for_weight_sync": _Verb("wake_up"),
}


def as_verb(method: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns the verb and its fields for a method of SkyRL. For any other method, its name and fields are returned
    unchanged.
    """
    verb = _METHODS.get(method, _Verb(method))
    return verb.name, {name: value for name, value in fields.items() if name not in verb.dropped} | dict(verb.fields)
