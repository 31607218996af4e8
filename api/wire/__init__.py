"""What goes over the wire: the types of requests, answers and errors, and how bytes become them."""
