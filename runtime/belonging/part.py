"""Registers the part of error messages that names the verifier for which a draft head was made."""

another_verifier = "wingbeat.runtime.belonging.another_verifier:another_verifier"
