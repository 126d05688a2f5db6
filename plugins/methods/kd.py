"""KD: distil the previous model's top-N items, all of them, for every old user."""

from fedcl_bench.toolbox.distillation import TopNDistillation


class KD(TopNDistillation):
    """F3CRec's client loss without adaptive sampling, and plain averaging at the server. L = L_rec + lambda_kd L_KD
    (Eq. 6 of F3CRec) with L_KD of Eq. 5 over the whole list of Eq. 1, both computed in
    ``fedcl_bench/toolbox/distillation.py``. Eq. 5 is printed as a sum (kd_reduction=sum); the released code takes the
    mean. The server averages (Eq. 7)."""

    name = "kd"
    numbers = 2
    title = "distillation of the previous model's top-N items, uniformly for all users"
    reference = "baseline of F3CRec (Lim et al., CIKM 2025, section 5.1)"
