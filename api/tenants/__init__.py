"""Who may ask for what: tenants, their keys and limits, and the gate that every request passes."""
