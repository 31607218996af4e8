"""The frontend: the actors that hold the requests."""
