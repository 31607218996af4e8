"""What a server owes its tenants, measured from outside: scale, stalls, fairness, hostile uploads."""
