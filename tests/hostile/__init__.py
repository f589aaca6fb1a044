"""Requests nobody should send, and an oracle of docs/http_api.md that says what each of them gets."""
