"""The engine: who runs a fit, an epoch and a step. It imports the ground, hooks, phases and the library alone."""
