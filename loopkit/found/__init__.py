"""Plugins and commands that are installed, found by their names."""
