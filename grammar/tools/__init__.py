"""Tool calls as each model family writes them; one small file per family."""
