"""Limits of the sandbox for tests in which nothing depends on them, on a machine that may be busy."""

from personae.grammar.sandbox.server import SandboxLimits

PATIENT = SandboxLimits(patience=600.0, mask_wall=600.0, share=0.25)
