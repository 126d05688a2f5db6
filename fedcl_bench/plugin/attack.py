"""What an attack is: malicious clients of a federation, what they know, and what they upload in place of an update.

Malicious clients never train by themselves: they are added to the honest ones, or they are some of them whose uploads
are replaced. Whatever an attack keeps from round to round is in ``state``, so that checkpoints have it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Mapping

from torch import Tensor

from .backbone import Backbone
from .method import NoSettings
from ..core.errors import Incompatible
from ..rng import DrawKey, Tables

if TYPE_CHECKING:
    from ..data.stream import Ragged, Step

Uploads = Mapping[str, "tuple[Tensor, Tensor | None]"]


@dataclass(frozen=True)
class Seen:
    """What the M malicious clients of a round see."""

    clients: Tensor  # their numbers, ascending, (M,): added ones are numbered from 0, others are users
    # The item tables and other public parameters that the server sent
    public: Tables
    dense: Tables
    rates: Mapping[str, float]  # the learning rate at which honest clients train each parameter, by name
    targets: Tensor  # items to promote, (T,)
    known: Ragged  # the interactions that the attacker knows, of all users (see ``Attack.known_share``)
    # Of users whose uploads are replaced, what their training has changed, each (M, ...), item tables (M, items, ...).
    changes: Tables
    draw: DrawKey  # key of the round's random numbers


class Attack:
    """Base class of attacks: malicious clients that send nothing.

    Attributes:
        among_users: malicious clients are users of the stream, who train as all others, but send something else; or
            they are added to them, without data.
        targets: how many items it promotes, whose exposure results have; they are drawn among those of block 0.
        known_share: the share of each user's training interactions in the block that the attacker knows, drawn at
            random and rounded up.
        state: tensors that the attacker keeps, by name; assign new ones, change none in place.
    """

    kind: ClassVar[str] = "attack"
    name: ClassVar[str]
    title: ClassVar[str]
    reference: ClassVar[str] = ""
    Settings: ClassVar[type] = NoSettings
    among_users: ClassVar[bool] = False
    ambiguities: ClassVar[Mapping[str, Mapping[Any, str]]] = {}
    targets: int = 0
    known_share: float = 0.0

    def __init__(self, settings: Any):  # an object of the class's own Settings
        self.settings = settings
        self.state: dict[str, Tensor] = {}

    def check(self, step: Step, backbone: Backbone) -> None:
        """Before the run: raise UserError if a setting does not fit the data, of which ``step`` is the first, or
        Incompatible if the backbone does not suit."""

    def upload(self, seen: Seen) -> Uploads:
        """What the malicious clients of a round send: changes of public parameters by name, and where. Of an item table
        rows (M, n, ...) and their items, int64 (M, n), each once; with None for the items all of them, or a parameter
        without items, (M, ...). A parameter that is left out is not changed by clients that were added, and changed as
        they trained it by others."""
        return {}


def inner_product_table(attack: Attack, backbone: Backbone) -> str:
    """The name of the one public table whose rows logits are inner products with; raises Incompatible."""
    def fits(cls: Any) -> bool:
        return cls.factor_names is not None and not cls.whole_tables

    tables = backbone.new_rows(0, range(0), range(0))[0]
    if not fits(backbone) or len(tables) != 1:
        raise Incompatible(f"attack '{attack.name}' needs scores that are inner products of rows of one public table, "
                           f"which '{backbone.name}' has none of.", "backbone", fits)
    return next(iter(tables))
