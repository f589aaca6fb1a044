"""Is this drafter the right one for this verifier?"""
