"""Hooks of autoscaling by load. The implementations are given by import path, because commands import this file."""

scaling_config = "wingbeat.deployments.load_policy.scaling:scaling_config"
verifier_base = "wingbeat.deployments.load_policy.load_reports:LoadReports"
replica_tasks = "wingbeat.deployments.load_policy.load_reports:measure_speed"
