"""A simulated GPU: tensors on `cuda`, a device that works late, and no graphics card.

    with PaperGpu() as gpu:                      # torch.cuda, Triton's launches and the allocators are
    doubles
        x = torch.zeros(4, device="cuda")        # computed when something waits for it, and not before
        gpu.waits                                # whatever made the host wait, and where

`machine.py` explains how it works, `tensors.py` what is refused, `launches.py` what a launch must be,
`driver.py` virtual memory.
"""

from paper_gpu.cuda import PaperGpu
from paper_gpu.machine import Late, Machine, Mistake, Wait
from paper_gpu.tensors import PaperTensor

__all__ = ["Late", "Machine", "Mistake", "PaperGpu", "PaperTensor", "Wait"]
