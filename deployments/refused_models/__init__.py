"""Models that an engine has refused, remembered for the replicas that start later."""
