"""An answer that is bound always closes: within its token budget it is complete. `matcher.py` says how."""
