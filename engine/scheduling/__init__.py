"""Who computes what in the next step: queues, fairness, seats, pages, prefix cache. No tensors, no clock."""
