"""FT: fine-tuning, the lower reference."""

from fedcl_bench import Method


class FT(Method):
    """Carry all parameters over and train on the block's data alone: the base class unchanged. L = L_rec, and the
    server's mean of the uploads is the next round's table (Eq. 7 of F3CRec)."""

    name = "ft"
    numbers = 1
    title = "fine-tuning: carry parameters over, nothing else"
    reference = "lower reference of F3CRec (Lim et al., CIKM 2025, section 5.1)"
