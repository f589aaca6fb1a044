"""Chats that call tools and think: their fields, how their answers are read, and what other forms of answers share."""
