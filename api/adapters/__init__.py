"""Adapters that are added and removed while the server runs: uploads, the registry, its routes."""
