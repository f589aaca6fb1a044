"""Grammars (JSON schemas, regular expressions, EBNF, structural tags) that constrain answers, implemented with
llguidance.
"""
