"""`/v1/replicas`: the engines behind this server, and how many there are."""
