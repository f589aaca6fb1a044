"""Hooks of live settings. The implementations are given by import path, because commands import this file."""

router_base = "wingbeat.deployments.live_settings.live_router:LiveRouter"
verifier_base = "wingbeat.deployments.live_settings.live_verifier:LiveVerifier"
