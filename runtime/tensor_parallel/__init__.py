"""Tensor parallelism: one verifier over several processes.

Each rank holds a part of every weight, and runs every pass that rank 0 announces.
"""
