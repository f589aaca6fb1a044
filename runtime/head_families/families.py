"""The families of draft heads, and the config fields and tensor names by which each family is recognised."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from wingbeat.runtime.heads.files import object_field

ONE_PASS = ("DFlash", "DFlash2", "DSpark", "JetSpec", "P-EAGLE")
"""Families whose heads draft all their tokens in one pass."""


class Sign(NamedTuple):
    """Evidence for a family. A checkpoint belongs to the family if at least one field of this object matches."""

    family: str
    architectures: tuple[str, ...] = ()
    """Substrings, in lower case, of a name in the config field `architectures`."""
    speculators: tuple[str, ...] = ()
    """Values of the config field `speculators_model_type`."""
    tensors: tuple[str, ...] = ()
    """Substrings of a tensor name."""
    config: Callable[[Mapping[str, Any]], bool] = lambda raw: False


def _projector(kind: str) -> Callable[[Mapping[str, Any]], bool]:
    def stated(raw: Mapping[str, Any]) -> bool:
        values = (raw.get("projector_type"), _dflash(raw).get("projector_type"))
        return kind in (str(value).lower() for value in values)

    return stated


def _dflash(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return object_field(raw, "dflash_config")


def _drafts_in_parallel(raw: Mapping[str, Any]) -> bool:
    step = object_field(raw, "eagle_config").get("parallel_draft_step")
    return bool(raw.get("parallel_drafting")) or step not in (None, 0, 1)


SIGNS = (
    Sign("EAGLE-4", ("eagle4",), tensors=("efficient_lm_head",)),
    Sign("Domino", ("domino",), ("domino",), ("prefix_gru.",), _projector("domino")),
    Sign("xPress", ("xpress",), ("xpress",), ("mix.L",), _projector("xpress")),
    Sign("LiLiCorr", ("lilicorr",), ("lilicorr",), ("relative_slot_bias",), _projector("lilicorr")),
    Sign("DFlare", ("dflare",), ("dflare",)),
    Sign("DFlash2", ("dflash2",), ("dflash2",), ("candidate_selector.",)),
    Sign("DSpark", ("dspark",), ("dspark",), ("markov_w1",), lambda raw: "markov_rank" in raw),
    Sign("JetSpec", ("jetspec",), ("jetspec",), config=lambda raw: bool(_dflash(raw).get("causal_head"))),
    Sign("P-EAGLE", ("peagle",), ("peagle", "p_eagle", "p-eagle"), ("mask_hidden",), _drafts_in_parallel),
    Sign(
        "DFlash",
        ("dflash", "museglimmerassistant"),
        ("dflash",),
        ("encoder.output_norm_enc",),
        lambda raw: "dflash_config" in raw,
    ),
    Sign("Medusa", ("medusa",), config=lambda raw: "medusa_num_heads" in raw),
    Sign("Hydra", ("hydra",)),
)
"""Signs in order of precedence. A family comes before the family that it extends, because checkpoints of the extending
family also have the signs of the extended family.
"""


def family_told(raw: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """The first family of `SIGNS` that matches a checkpoint's config or tensors; None if none matches.

    Raises:
        CheckpointError: a field that should be an object is not.
    """
    names = tuple(names)
    architectures = str(raw.get("architectures") or "").lower()
    kind = str(raw.get("speculators_model_type") or "").lower()
    # Tensors named mtp.* belong to the verifier's MTP modules, not to a head.
    own = [name for name in names if not name.startswith("mtp.")]
    for sign in SIGNS:
        if (
            any(part in architectures for part in sign.architectures)
            or kind in sign.speculators
            or any(part in name for part in sign.tensors for name in own)
            or sign.config(raw)
        ):
            return sign.family
    if "fc.weight" in own and "hidden_norm.weight" in own and not any(n.endswith(".hidden_norm.weight") for n in own):
        return "DFlash"
    return None
