"""MTP modules among what can be trained: a module of the verifier's own class."""

trained_families = {"mtp": "wingbeat.runtime.training.mtp.mtp_family:MtpFamily"}
