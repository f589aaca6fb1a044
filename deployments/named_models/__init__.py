"""`wingbeat fetch`. Optional: everything else works without this folder."""
