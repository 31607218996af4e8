"""The checks of other servers' entry-point tests, rewritten so that they run against any server."""
