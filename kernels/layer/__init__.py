"""What a decoder layer does between its products and its attention."""
