"""Suites that measure what the engine promises, on data that others made."""
