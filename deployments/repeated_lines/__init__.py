"""Log lines that are repeated, shown once."""
