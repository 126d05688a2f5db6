"""KD: distil the previous model's top-N items, all of them, for every old user."""

from fedcl_bench.distillation import TopNDistillation


class KD(TopNDistillation):
    """F3CRec's client loss without adaptive sampling, and plain averaging at the server."""

    name = "kd"
    title = "distillation of the previous model's top-N items, uniformly for all users"
    reference = "baseline of F3CRec (Lim et al., CIKM 2025, section 5.1)"
