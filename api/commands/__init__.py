"""What the command line runs: `serve`, `chat` and `simulate`; `cli.py` reads their options."""
