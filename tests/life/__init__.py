"""What begins, stops, pauses, fails and goes on: the life of a fit, seen from outside."""
