"""Pure and synchronous: scheduling, paging, batching, models, sampling. No I/O of its own, no clock."""
