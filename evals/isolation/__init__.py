"""Checks that a sequence's tokens depend only on its log: random traffic, compared with each request
alone."""
