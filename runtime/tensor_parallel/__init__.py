"""Tensor parallelism: one verifier over several processes.

Each rank holds a part of each weight, and runs all passes that rank 0 announces.
"""
