"""The ground: modules that import only torch and Python."""
