"""Tensor parallelism: one verifier over several processes.

Each rank holds a part of every weight and runs rank 0's passes.
"""
