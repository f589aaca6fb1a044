"""Several models behind one endpoint: the setting `models`."""

from wingbeat.deployments.several_models.settings import check_settings, served, settings, with_served

__all__ = ["check_settings", "served", "settings", "with_served"]
