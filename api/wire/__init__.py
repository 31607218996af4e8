"""The wire format: the types of requests, answers and errors, and how bytes become them."""
