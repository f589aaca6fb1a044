"""Methods of SkyRL's worker extension for vLLM, which its client calls by `/collective_rpc`, as verbs."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class _Verb(NamedTuple):
    """A verb that does a method's work."""

    name: str
    fields: Mapping[str, Any] = {}
    """Fields beside the method's own."""
    dropped: frozenset[str] = frozenset()
    """Arguments of the method that have no effect here."""


# A sleep within SkyRL's pause keeps running requests; they are prefilled again, so `offload_kv` has nothing to save.
_METHODS = {
    "skyrl_start_weight_update": _Verb("start_weight_update"),
    "update_weights_nccl": _Verb("update_weights"),
    "skyrl_finish_weight_update": _Verb("finish_weight_update"),
    "skyrl_sleep_for_weight_sync": _Verb("sleep", {"level": 2, "mode": "keep"}, frozenset({"offload_kv"})),
    "skyrl_wake_for_weight_sync": _Verb("wake_up"),
}


def as_verb(method: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns verb and fields for a method of SkyRL's; any other method is returned as it is."""
    verb = _METHODS.get(method, _Verb(method))
    return verb.name, {name: value for name, value in fields.items() if name not in verb.dropped} | dict(verb.fields)
