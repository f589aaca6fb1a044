"""`wingbeat inspect`: shows what a checkpoint contains."""
