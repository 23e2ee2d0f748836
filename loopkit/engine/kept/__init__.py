"""The saved parts of a run, and the search for state that is not saved."""
