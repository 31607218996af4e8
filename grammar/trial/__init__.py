"""Compiles that may not end are tried in a process that can be killed; small ones are known to end."""
