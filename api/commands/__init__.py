"""The implementation of `serve`, `chat` and `simulate`; `cli.py` reads their options."""
