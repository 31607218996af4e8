"""`/v1/batches`: many requests in a file, answered when there is room."""
