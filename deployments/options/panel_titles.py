"""Titles of the groups of settings in a command's help. Imports nothing, because every process imports the settings."""

MODEL, DRAFTING, MEMORY = "Model and weights", "Drafting", "Batches and memory"
CLUSTER, LIMITS, API = "Replicas and Ray", "Queues and time limits", "HTTP API"
FEATURES, LEARNING, MEASURING = (
    "Adapters, images and audio, embeddings, prefixes",
    "Learning and recording",
    "Measuring",
)
TITLES = (MODEL, DRAFTING, MEMORY, API, CLUSTER, LIMITS, FEATURES, LEARNING, MEASURING)
"""All titles, in the order in which help shows them."""
