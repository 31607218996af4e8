"""Several base models behind one address, each with an engine that runs while it is needed."""
