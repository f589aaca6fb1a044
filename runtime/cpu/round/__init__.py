"""The round of a CPU: trees are checked, chosen, laid out and accepted by C++, without padding."""
