"""The command that shows what a checkpoint holds."""
