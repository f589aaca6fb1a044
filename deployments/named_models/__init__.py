"""`wingbeat fetch`. Optional: the rest works without this folder."""
