"""Compiles that may not end run in processes that the kernel ends; small ones are known to end."""
