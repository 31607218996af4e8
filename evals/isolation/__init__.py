"""Whether a sequence's tokens depend on anything but its log: random traffic against each request alone."""
