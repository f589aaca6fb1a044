"""Settings that an operator changes while replicas run, by the deployments' `user_config`."""
