"""The web console: static files that the server serves itself, and a check of what binds an answer."""
