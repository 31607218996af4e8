"""`/v1/files`: the input files that clients upload for batches, and the batches' results."""
