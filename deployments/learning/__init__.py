"""A draft head that is trained on served traffic: its learner, and the judge of its versions."""
