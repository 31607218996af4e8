"""Runs suites: targets, records, the runner, statistics."""
