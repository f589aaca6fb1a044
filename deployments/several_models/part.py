"""Hooks of several models behind one endpoint: the setting `models`."""

check_settings = "wingbeat.deployments.several_models.settings:check_settings"
served = "wingbeat.deployments.several_models.settings:served"
settings = "wingbeat.deployments.several_models.settings:SETTINGS"
with_served = "wingbeat.deployments.several_models.settings:with_served"
