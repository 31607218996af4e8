"""Placement policies: where a request goes. One file per policy."""
