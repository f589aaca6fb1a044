"""Recognises heads of families that cannot be loaded as EAGLE heads."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from wingbeat.runtime.head_families.families import ONE_PASS, family_told
from wingbeat.runtime.heads.files import object_field
from wingbeat.runtime.heads.layouts import UnsupportedCheckpointError, is_eagle3, speculators_type


def other_family(raw: Mapping[str, Any], names: Iterable[str]) -> UnsupportedCheckpointError | None:
    """The error for a checkpoint of another family than EAGLE; None if there is no sign of such a family.

    Args:
        raw: fields of config.json.
        names: names of the checkpoint's tensors.
    """
    family = _family(raw, names)
    return None if family is None else _refusal(family)


def _family(raw: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The name of a family that cannot be loaded as an EAGLE head; None if there is no sign of such a family."""
    names, eagle_config = tuple(names), object_field(raw, "eagle_config")
    told = family_told(raw, names)
    if told is not None:
        return told
    kind = speculators_type(raw)
    if kind and kind != "eagle3":
        return f"the speculators kind {kind!r}"

    def any_name(test: Callable[[str], bool]) -> bool:
        return any(test(name) for name in names)

    head_like = is_eagle3(names) or any_name(lambda name: name == "fc.weight")
    eagle1_like = head_like and not is_eagle3(names)
    signs = {
        "an EAGLE-1 head of several decoder layers": eagle1_like and any_name(lambda n: n.startswith("layers.1.")),
        "an EAGLE-1 head with MLA attention": eagle1_like and any_name(lambda n: ".kv_b_proj." in n),
        "a head with a mixture of experts": head_like and any_name(lambda name: ".experts." in name),
        "ModelOpt's head with eagle_config.use_mtp_layernorm": bool(eagle_config.get("use_mtp_layernorm")),
        "an EAGLE-3 head over one hidden state (eagle_config.use_aux_hidden_state: false)": (
            is_eagle3(names) and eagle_config.get("use_aux_hidden_state") is False
        ),
    }
    return next((family for family, seen in signs.items() if seen), None)


def _refusal(family: str) -> UnsupportedCheckpointError:
    """The error for a checkpoint of a family that cannot be loaded as an EAGLE head."""
    if family == "EAGLE-4":
        return UnsupportedCheckpointError("EAGLE-4 is not supported: its licence allows no independent server")
    if family in ONE_PASS:
        return UnsupportedCheckpointError(f"{family} drafts in one pass: it is read as a drafter, not as an EAGLE head")
    return UnsupportedCheckpointError(
        f"{family} is not supported: heads of EAGLE-1, -2, -3 and -3.1 with Llama, Qwen3 or MLA layers are, "
        f"and of {', '.join(ONE_PASS)}"
    )
