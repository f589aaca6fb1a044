"""Images and audio of requests, which are fetched from allowed hosts, decoded within limits, and prepared for the
model.
"""
