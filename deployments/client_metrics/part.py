"""Hooks of client figures. The implementations are given by import path, because commands import this file."""

families = "wingbeat.deployments.client_metrics.families:families"
router_figures = "wingbeat.deployments.client_metrics.client_figures:RouterFigures"
router_reports = "wingbeat.deployments.client_metrics.router_reports:RouterReports"
