"""HTTP itself: connections and their limits, the table of routes, forms, and how the server stops."""
