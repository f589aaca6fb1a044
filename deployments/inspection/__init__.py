"""`wingbeat inspect`: shows what a checkpoint holds."""
