"""Engines on other machines: Ray starts their processes, and frames go over direct sockets."""
