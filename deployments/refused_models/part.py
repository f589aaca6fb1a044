"""Hook of refused models. The implementation is given by import path, because commands import this file."""

replica_engines = "wingbeat.deployments.refused_models.remembering_engines:remembering_engines"
