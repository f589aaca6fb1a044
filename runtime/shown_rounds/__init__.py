"""Rounds of requests that ask for their draft trees."""
