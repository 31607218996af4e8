"""Scheduling, paging, batching, models, sampling. Pure and synchronous: no I/O of its own, no clock."""
