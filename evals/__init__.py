"""Drives the server from outside, and the engine directly where it measures it."""
