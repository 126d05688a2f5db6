"""What there is, one line each; nothing here waits for PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterable, Mapping

from rich.console import Console

from ..runs.cards import RECBOLE, Card

if TYPE_CHECKING:
    from ..runs.registry import Registry


def cards_of(registry: Registry) -> list[Card]:
    """The loaded plugins as ``read_all`` reads them."""
    return [Card(plugin.kind, plugin.name, plugin.cls.title, plugin.cls.reference,
                 getattr(plugin.cls, "reimplementation", False), plugin.path) for plugin in registry.plugins.values()]


def show_listing(cards: Iterable[Card], titles: Mapping[str, str], broken: Mapping[str, str]) -> None:
    """One line per method, backbone, metric and dataset; plugins that cannot be loaded with their error.

    Args:
        titles: of the datasets, by name.
        broken: file to error.
    """
    console = Console(highlight=False, soft_wrap=True, markup=False)
    cards = sorted(cards, key=lambda card: card.name)
    width = 2 + max(16, *(len(name) for name in (*(card.name for card in cards), *titles, *broken)))
    for kind in ("method", "backbone", "metric"):
        console.print(f"{kind}s", style="bold")
        for card in cards:
            if card.kind == kind:
                mark = " [re-implementation]" if card.reimplementation else ""
                console.print(f"  {card.name:<{width}}{card.title}{mark}", markup=False)
        if kind == "backbone":
            console.print(f"  {RECBOLE + 'NAME':<{width}}RecBole's own models; `list recbole` shows which",
                          markup=False)
    console.print("datasets", style="bold")
    for name, title in titles.items():
        console.print(f"  {name:<{width}}{title}", markup=False)
    if broken:
        console.print("cannot be loaded", style="bold")
        for name, error in broken.items():
            console.print(f"  {name:<{width}}{error}", markup=False)
    console.print("\n`list NAME` shows one of them in full.", markup=False)


def show_recbole_models() -> None:
    """Which RecBole models can be backbones."""
    from ..recbole import client_facts, domain_facts
    from ..recbole.models import names

    console = Console(highlight=False, soft_wrap=True, markup=False)
    for name, kind in names().items():
        by_domains = f"; by domains: {domain_facts.status(name)}" if kind == "sequential" else ""
        console.print(f"  {name:<12}{kind:<12}{client_facts.status(name)}{by_domains}")
    console.print("\n`list recbole:NAME` shows a model's settings.")
