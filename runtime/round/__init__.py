"""What a round is: its rows, its passes, the tokens it chooses, and the round until the host knows them."""
