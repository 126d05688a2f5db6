"""Joint: retraining on all data so far, the usual upper bound of continual learning; from scratch or warm."""

from fedcl_bench import Method


class Joint(Method):
    """In block t clients train on their data of the blocks 0..t, from untrained parameters: nothing is forgotten and
    nothing need be stored sparingly. Validation, tests and masks are those of FT."""

    name = "joint"
    numbers = 1
    title = "bound: federated retraining from scratch on all data up to the block"
    reference = "the joint-training bound of continual learning (De Lange et al., TPAMI 2022)"
    history = restarts = True
    gives_up = {"C1": "clients keep the data of all earlier blocks"}


class JointWarm(Joint):
    """The same from the last block's model, as FT starts."""

    name = "joint-warm"
    numbers = 1
    title = "bound: federated training on all data up to the block, from the last model"
    restarts = False
