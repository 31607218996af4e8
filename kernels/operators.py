"""The operators that callers choose an implementation of, each made from its reference."""

from personae.kernels import reference, reference_latent, reference_states
from personae.kernels.registry import Operator

rms_norm = Operator(reference.rms_norm)
add_rms_norm = Operator(reference.add_rms_norm)
rotary = Operator(reference.rotary)
silu_and_mul = Operator(reference.silu_and_mul)
gelu_and_mul = Operator(reference.gelu_and_mul)
swiglu_clamped = Operator(reference.swiglu_clamped)

append_kv = Operator(reference.append_kv)
append_latent = Operator(reference.append_latent)
paged_attention = Operator(reference.paged_attention)
latent_attention = Operator(reference_latent.latent_attention)

short_convolution = Operator(reference.short_convolution)
gated_delta = Operator(reference_states.gated_delta)
selective_state = Operator(reference_states.selective_state)

route = Operator(reference.route)
route_scored = Operator(reference.route_scored)
expert_linear = Operator(reference.expert_linear)
combine = Operator(reference.combine)

sgmv = Operator(reference.sgmv)
"""One call serves the modules that read the same x (q, k, v; gate, up; o; down)."""

choose = Operator(reference.choose)
