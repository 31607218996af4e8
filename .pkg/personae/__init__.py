"""Personae: many fine-tuned personas of one base model, served from one engine.

The folders beside this file are links to the folders at the top of the repository; `docs/architecture.md`
walks a request through them.
"""

__version__ = "0.1.0"
