"""What an adapter is: its file format, its digest, its place in memory, its rows in a batch."""
