"""The drafter `mtp`."""

from wingbeat.runtime.drafters.drafter_kind import DrafterKind


def drafter_kinds() -> tuple[DrafterKind, ...]:
    """Drafts where the verifier's checkpoint has the modules."""
    module = "wingbeat.runtime.mtp"
    return (
        DrafterKind(
            "mtp",
            f"{module}.mtp_drafter:build_mtp",
            f"{module}.mtp_loader:check_modules",
            modules=f"{module}.mtp_names:find_modules",
            modules_title="prediction modules (MTP)",
        ),
    )
