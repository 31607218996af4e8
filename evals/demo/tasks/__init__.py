"""The tasks: one file each, a function from `Values` (one split of one random stream) to a `Sample`."""
