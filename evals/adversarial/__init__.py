"""A model that always prefers forbidden tokens, served over HTTP, and a suite that checks its bound
answers."""
