"""What operators see: `/metrics`, logs and traces."""
