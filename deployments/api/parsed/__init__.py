"""Chats with tool calls and reasoning: request fields, parsing of answers, and code shared by other APIs' answers."""
