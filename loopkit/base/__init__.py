"""The ground: what stands on torch and Python alone, and imports nothing above it."""
