"""The engine: who runs a fit, an epoch and a step. It imports only the ground, hooks, phases and the library."""
