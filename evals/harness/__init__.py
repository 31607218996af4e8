"""Running suites: targets, records, the runner, statistics."""
