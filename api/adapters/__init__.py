"""Adapters that come and go while the server runs: uploads, the registry, its routes."""
