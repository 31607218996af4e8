"""HTTP, command line and library: speaks JSON, knows no tensor."""
