"""Registers the drafter `mtp`, for checkpoints with MTP modules."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind

drafter_kinds = (
    DrafterKind(
        "mtp",
        "wingbeat.runtime.mtp.mtp_drafter:build_mtp",
        modules="wingbeat.runtime.mtp.mtp_names:find_modules",
        modules_title="prediction modules (MTP)",
    ),
)
