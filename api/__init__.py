"""HTTP and command line: speaks JSON, knows no tensor."""
