"""Published models by short names, fetched from PyPI. Optional: the core works without this folder."""
