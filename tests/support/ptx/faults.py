"""What the interpreter refuses."""


class Fault(Exception):
    """A kernel did what a GPU forbids, leaves undefined or orders in no way; the message says where."""
