"""JSON Schema: what a caller wrote, what of it can be enforced, and what has to be refused."""
