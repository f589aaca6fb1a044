"""EAGLE-3 heads of compressed attention (MLA)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wingbeat.runtime.heads.layouts import Layout


def compressed_head(
    body: Mapping[str, Any], layout: "Layout", shapes: Mapping[str, tuple[int, ...]]
) -> tuple[type, dict[str, Any]]:
    """Class of the config of such a head, and fields in the place of those of plain attention."""
    from wingbeat.runtime.latent_heads.latent_head import LatentEagleConfig, latent_fields

    return LatentEagleConfig, latent_fields(body, layout, shapes)
