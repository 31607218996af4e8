"""Where a request goes: one file per policy."""
