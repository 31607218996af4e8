"""Adapters that other projects' trainers write, trained and served for real."""
