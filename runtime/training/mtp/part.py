"""MTP modules among what can be trained."""


def trained_families() -> dict[str, str]:
    """A module of the verifier's own class."""
    return {"mtp": "wingbeat.runtime.training.mtp.mtp_family:MtpFamily"}
