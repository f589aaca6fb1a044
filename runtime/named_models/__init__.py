"""Published models under short names, downloaded from PyPI. The folder is optional: the core works without it."""
