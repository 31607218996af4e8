"""Reads JSON that has begun: what it is so far, whether a schema may hold for it, and how it may end."""
