"""Autoscaling by the tokens that replicas have to compute, in place of Serve's policy, which counts calls."""
