"""From a folder to a model that is proven to write its own text."""
