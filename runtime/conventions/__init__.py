"""Which of several readings of a head is right: measured."""
