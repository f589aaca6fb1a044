"""Matrix products of few rows with one weight."""
