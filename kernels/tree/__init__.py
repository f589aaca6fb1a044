"""Token trees: masks, growth, the accepted path."""
