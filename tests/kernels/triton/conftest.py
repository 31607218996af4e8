"""These tests run in the interpreter, which Triton must be told before it is imported.

So they have a process of their own: `tests/kernels/test_triton.py` starts it, and so can you:
`TRITON_INTERPRET=1 pytest tests/kernels/triton`. In any other process they are not collected.
"""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
