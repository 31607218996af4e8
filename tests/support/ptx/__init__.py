"""An interpreter of PTX: a GPU's kernels, as they are compiled, run on a CPU by NumPy.

with Interpreted(90) as gpu:              # Hopper; what the kernels' host functions launch is interpreted
    rms_norm(x, residual, weight, 1e-5)   # on CPU tensors
gpu.runs                                  # what was launched, its instructions and its bytes

See `execute.py` for how one launch runs, `global_memory.py` and `shared_memory.py` for what is checked,
`cases.py` for the cases of our kernels.
"""

from ptx.execute import Buffer, execute
from ptx.faults import Fault
from ptx.launches import Interpreted, unwritten

__all__ = ["Buffer", "Fault", "Interpreted", "execute", "unwritten"]
