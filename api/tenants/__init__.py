"""Tenants, their keys and limits, and the check that every request passes."""
