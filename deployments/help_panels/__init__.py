"""Groups of options in a command's help."""
