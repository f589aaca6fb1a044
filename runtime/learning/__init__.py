"""Online training of a draft head on served requests, and the test of whether a trained head is better than the served
head.
"""
