"""Suites that measure what the engine promises, mostly on public data."""
