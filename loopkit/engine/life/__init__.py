"""A fit and its epochs, from begin to end."""
