"""Registers MTP modules as a trainable family."""

trained_families = {"mtp": "wingbeat.runtime.training.mtp.mtp_family:MtpFamily"}
