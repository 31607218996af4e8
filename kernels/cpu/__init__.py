"""The operators for x86 and other CPUs."""
