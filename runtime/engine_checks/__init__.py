"""Tests of kernels, captured graphs and drafter at start."""
