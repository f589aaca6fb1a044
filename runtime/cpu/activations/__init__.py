"""Rows that are rounded to eight bits before they are multiplied by packed weights."""
