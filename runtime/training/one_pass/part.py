"""Part that trains one-pass heads."""

from pathlib import Path


def trained_families() -> dict[str, str]:
    """DFlash, what is built upon it, and P-EAGLE."""
    module = "wingbeat.runtime.training.one_pass.one_pass_families"
    return {
        "dflash": f"{module}:DFlashFamily",
        "jetspec": f"{module}:jetspec_family",
        "dspark": f"{module}:DSparkFamily",
        "dflash2": f"{module}:DFlash2Family",
        "p-eagle": f"{module}:ParallelEagleFamily",
    }


def family_of_head(folder: Path) -> str | None:
    """The family of a one-pass head; None for other heads."""
    from wingbeat.runtime.heads.families import one_pass_family
    from wingbeat.runtime.heads.files import read_config, read_shapes

    found = one_pass_family(read_config(folder), read_shapes(folder))
    return None if found is None else found.lower()
