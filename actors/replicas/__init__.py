"""Several engines behind one frontend."""
