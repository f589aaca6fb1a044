"""Ends what is left of a Ray cluster that was started here, if the launcher is killed or Ray's head has ended."""
