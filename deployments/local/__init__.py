"""An engine in the process of a command, and `wingbeat generate`."""
