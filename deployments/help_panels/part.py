"""Hooks of the groups of options in help."""

option_panel = "wingbeat.deployments.help_panels.panels:panel_of"
option_place = "wingbeat.deployments.help_panels.panels:place"
command_class = "wingbeat.deployments.help_panels.panels:GroupedCommand"
