"""The HTTP API as an OpenAPI document and as a page."""
