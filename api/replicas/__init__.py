"""`/v1/replicas`: the engines behind this server, and their number."""
