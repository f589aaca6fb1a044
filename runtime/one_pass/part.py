"""Part of drafters that draft in one pass."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """Told by the families that can be read."""
    module = "wingbeat.runtime.one_pass"
    return (
        DrafterKind(
            "one_pass",
            f"{module}.one_pass_drafter:build_one_pass",
            f"{module}.check:check_one_pass_drafter",
            folder="a one-pass head",
            claims="wingbeat.runtime.heads.families:one_pass_family",
            readings=f"{module}.readings:one_pass_readings",
            matches=f"{module}.blocks:block_matches",
        ),
    )
