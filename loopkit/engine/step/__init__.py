"""One batch: its step, the window that it belongs to, and the loop that runs it."""
