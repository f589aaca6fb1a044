"""Operations on CPUs, in C++ that is compiled on the machine it runs on; torch references beside them."""
