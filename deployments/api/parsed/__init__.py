"""Chats with tool calls and reasoning: request fields, parsing of answers, and code that other APIs share."""
