"""Steps of attention over keys and values that are made of a latent."""
