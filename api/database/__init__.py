"""The databases that a server can keep its records in: an SQLite file, or PostgreSQL."""
