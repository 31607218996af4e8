"""A worker computes logits from a plan and the tokens that the host knows, on one device or on several."""
