"""Registers the drafters that draft in one pass. A folder is assigned to one of them if the folder's head is of that
drafter's family.
"""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "one_pass",
        "wingbeat.runtime.one_pass.one_pass_drafter:build_one_pass",
        folder="a one-pass head",
        claims="wingbeat.runtime.one_pass.families:one_pass_family",
        readings="wingbeat.runtime.one_pass.readings:one_pass_readings",
        matches="wingbeat.runtime.one_pass.blocks:block_matches",
    ),
)
