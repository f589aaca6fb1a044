"""The `wingbeat` command."""
