"""Around the experts of a mixture: which of them a token takes, and the sum of what they say."""

from personae.kernels import reference
from personae.kernels.registry import Operator

route = Operator(reference.route)
combine = Operator(reference.combine)
