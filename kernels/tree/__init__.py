"""Draft trees: masks, growth, the accepted path."""
