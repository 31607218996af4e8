"""`python -m personae` is the `personae` command."""

from personae.api.cli import main

main()
