"""What other tools call: trainers that hand their adapters to a server."""
