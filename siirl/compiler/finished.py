"""Which ranks know that a node has run on all of its ranks: what an exchange tells them. Pure."""

import functools
from collections.abc import Iterable

from siirl.parallel.placement import Ranks


class Finished:
    """For each node that has run: who knows it of which of its ranks.

    Ranks that are in the same sets of ranks throughout know the same, so they are one class of ranks. After
    an exchange all who took part know what any of them knew before.
    """

    def __init__(self, ranks: Iterable[Ranks]) -> None:
        """ranks: the sets of ranks that nodes run on."""
        member: dict[int, int] = {}
        for index, together in enumerate(dict.fromkeys(ranks)):
            for rank in together:
                member[rank] = member.get(rank, 0) | 1 << index
        classes = {sets: number for number, sets in enumerate(dict.fromkeys(member.values()))}
        self._class = {rank: classes[sets] for rank, sets in member.items()}
        self._known: dict[str, tuple[int, dict[int, int]]] = {}
        self._bits = functools.cache(self._classes_of)
        sizes = [0] * len(classes)
        for number in self._class.values():
            sizes[number] += 1
        self._alone = [size == 1 for size in sizes]

    def ran(self, node: str, ranks: Ranks) -> None:
        """A node has run; each of its ranks knows that of itself."""
        bits = self._bits(ranks)
        own = {number: 1 << number if self._alone[number] else 0 for number in _members(bits)}
        self._known[node] = bits, own

    def met(self, ranks: Ranks) -> None:
        """An exchange that ends on no rank before all have begun it."""
        everyone = self._bits(ranks)
        for _, known in self._known.values():
            for number, bits in known.items():
                if (bits | 1 << number) & everyone:
                    known[number] = bits | everyone

    def is_known(self, node: str, ranks: Ranks) -> bool:
        """Whether each of `ranks` has run the node itself, or knows that all of its ranks have."""
        own, known = self._known[node]
        others = self._bits(ranks) & ~own
        return all(not others & ~bits for bits in known.values())

    def _classes_of(self, ranks: Ranks) -> int:
        bits = 0
        for rank in ranks:
            bits |= 1 << self._class[rank]
        return bits


def _members(bits: int) -> list[int]:
    return [number for number in range(bits.bit_length()) if bits >> number & 1]
