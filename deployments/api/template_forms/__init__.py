"""Alternative forms of conversations for strict chat templates."""
