"""A model that always prefers what is not allowed, served over HTTP, and what is made of it."""
