"""Steps of a decoder layer besides its dense products and its attention."""
