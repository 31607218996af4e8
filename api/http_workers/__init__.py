"""Several processes that accept HTTP in front of the one that holds the requests: `--http-workers`."""
