"""CPU operations in C++, compiled on the machine that runs them, with torch references."""
