"""Compiles that may not end are made in processes that the kernel ends; small ones are known to end."""
