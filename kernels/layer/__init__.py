"""Steps of a decoder layer other than its dense matrix products and its attention."""
