"""Online training of a draft head on served requests, and the test whether a trained head is better."""
