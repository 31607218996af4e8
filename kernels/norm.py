"""Root mean square normalisation."""

from personae.kernels import reference
from personae.kernels.registry import Operator

rms_norm = Operator(reference.rms_norm)
add_rms_norm = Operator(reference.add_rms_norm)
