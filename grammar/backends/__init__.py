"""One file per grammar backend; each turns a spec into masks over the vocabulary."""
