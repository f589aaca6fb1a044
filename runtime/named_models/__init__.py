"""Published models under short names, downloaded from PyPI. Optional: the core works without this folder."""
