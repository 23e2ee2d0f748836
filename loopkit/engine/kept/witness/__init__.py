"""The search for state that is not saved."""
