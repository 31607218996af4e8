"""Engines on other machines: Ray starts their processes, and frames travel over direct sockets."""
