"""Makes bound answers close: an answer is complete within its token budget. `matcher.py` says how."""
