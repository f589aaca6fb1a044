"""Registers one-pass heads as trainable families."""

from pathlib import Path

trained_families = {
    "dflash": "wingbeat.runtime.training.one_pass.one_pass_families:DFlashFamily",
    "jetspec": "wingbeat.runtime.training.one_pass.one_pass_families:JetSpecFamily",
    "dspark": "wingbeat.runtime.training.one_pass.one_pass_families:DSparkFamily",
    "dflash2": "wingbeat.runtime.training.one_pass.one_pass_families:DFlash2Family",
    "p-eagle": "wingbeat.runtime.training.one_pass.one_pass_families:ParallelEagleFamily",
}
"""Training families by name: DFlash, its derivatives, and P-EAGLE."""


def family_of_head(folder: Path) -> str | None:
    """The family of a one-pass head in a folder; None for other heads."""
    from wingbeat.runtime.heads.files import read_config, read_shapes
    from wingbeat.runtime.one_pass.families import one_pass_family

    found = one_pass_family(read_config(folder), read_shapes(folder))
    return None if found is None else found.lower()
