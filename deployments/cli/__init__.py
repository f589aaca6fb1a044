"""The `wingbeat` command and its options."""
