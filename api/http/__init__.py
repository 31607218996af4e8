"""HTTP itself: connections and their limits, routes as a table, forms, how a server stops."""
