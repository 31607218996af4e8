"""Settings for the whole test session."""

import torch

# The models here are tiny: a second thread costs more than it brings, far more when the cores are shared.
torch.set_num_threads(1)
