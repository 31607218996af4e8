"""Workers compute: from a plan and the tokens that the host knows to logits, on one device or on several."""
