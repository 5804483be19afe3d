"""Cards with their figures and sources, and the ranges of speed that a step reaches on them.

Datasheets give peaks. A step reaches a share of them, so every card makes three machines: a slow one, a fast one, and one
between. The shares cover measured steps: an H100 ran this project's relay and training in core at 15 to 27 % of its peak
(`docs/BENCHMARKS.md`, "On a GPU", recompute counted), and SlideFormer (arXiv 2603.16428) reports 26 to 51 % of an RTX 4090's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from l2l_core import Machine
from l2l_core.trace import format_bytes

COMPUTE_SHARES = 0.15, 0.5  # of the dense peak of matrix products
LINK_SHARES = 0.7, 0.9  # of PCI Express, with pinned memory
UPDATE_SHARES = 0.75, 1.25  # of `UPDATE_PARAMS_PER_S`, which depends on the host's memory
DISK_SHARES = 0.6, 1.0  # of the speeds of a disk that was not measured
UPDATE_PARAMS_PER_S = 1.4e9  # by AdamW on 16 cores beside an H100 (`docs/BENCHMARKS.md`)

PCIE_4, PCIE_5 = 31.5e9, 63.0e9  # bytes per second of 16 lanes in one direction (PCI-SIG, 128b/130b coding)

_A100 = "NVIDIA A100 datasheet"
_H100 = "NVIDIA H100 datasheet; half of its bf16 figure, which is for sparse matrices"


@dataclass(frozen=True)
class GpuCard:
    """A card, by its datasheet.

    Attributes:
        name: name in the table.
        memory_bytes: memory in decimal GB; the binary rest, 7 %, is left to the driver and to CUDA's context.
        flops_per_s: peak of dense matrix products by precision; bf16 accumulates in float32, fp32 is without TF32.
        memory_bytes_per_s: peak of the card's memory.
        link_bytes_per_s: peak of the link to the host, in one direction.
        source: document of the figures.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str

    def machines(self, precision: str, update_params_per_s: float) -> SpeedRange:
        """Return the slowest, the middle and the fastest machine with this card."""

        def machine(compute: float, link: float, update: float) -> Machine:
            speed = link * self.link_bytes_per_s
            return Machine(
                compute * self.flops_per_s[precision], update * update_params_per_s, speed, speed, name=self.name
            )

        slow, fast = (machine(*shares) for shares in zip(COMPUTE_SHARES, LINK_SHARES, UPDATE_SHARES, strict=True))
        middle = machine(*map(middle_share, (COMPUTE_SHARES, LINK_SHARES, UPDATE_SHARES)))
        return SpeedRange(slow, middle, fast)


@dataclass(frozen=True)
class SpeedRange:
    """Machines between which the real one is."""

    slow: Machine
    middle: Machine  # takes the mean of the seconds of the other two
    fast: Machine


def middle_share(shares: tuple[float, float]) -> float:
    """Return the share at which work takes the mean of the seconds at these two."""
    return 2 / (1 / shares[0] + 1 / shares[1])


def _card(name: str, memory: float, bf16: float, fp32: float, memory_speed: float, link: float, source: str) -> GpuCard:
    return GpuCard(
        name, round(memory * 1e9), {"bf16": bf16 * 1e12, "fp32": fp32 * 1e12}, memory_speed * 1e9, link, source
    )


CARDS = {
    card.name: card
    for card in (  # name, GB, TFLOP/s in bf16 and fp32, GB/s of memory, link, source
        _card("RTX 3090 24GB", 24, 71, 35.6, 936, PCIE_4, "NVIDIA GA102 whitepaper"),
        _card("RTX 4090 24GB", 24, 165.2, 82.6, 1008, PCIE_4, "NVIDIA Ada whitepaper"),
        _card("RTX 5090 32GB", 32, 209.5, 104.8, 1792, PCIE_5, "NVIDIA RTX Blackwell whitepaper"),
        _card("L4 24GB", 24, 121, 30.3, 300, PCIE_4, "NVIDIA L4 datasheet; half of its sparse bf16 figure"),
        _card("L40S 48GB", 48, 362, 91.6, 864, PCIE_4, "NVIDIA L40S datasheet"),
        _card("A100 40GB", 40, 312, 19.5, 1555, PCIE_4, _A100),
        _card("A100 80GB", 80, 312, 19.5, 2039, PCIE_4, _A100),
        _card("H100 PCIe 80GB", 80, 756, 51, 2000, PCIE_5, _H100),
        _card("H100 80GB", 80, 989, 67, 3350, PCIE_5, _H100),
        _card("H200 141GB", 141, 989, 67, 4800, PCIE_5, "NVIDIA H200 datasheet; half of its sparse bf16 figure"),
    )
}


def find_card(name: str) -> GpuCard:
    """Return the card of this name, or the only one whose name contains it; case and spaces do not count.

    Raises:
        ValueError: no card, or several.
    """

    def plain(text: str) -> str:
        return text.lower().replace(" ", "")

    found = [card for card in CARDS.values() if plain(card.name) == plain(name)]
    found = found or [card for card in CARDS.values() if name and plain(name) in plain(card.name)]
    if len(found) == 1:
        return found[0]
    problem = "matches no card" if not found else f"matches {', '.join(card.name for card in found)}"
    raise ValueError(
        f'card={name!r} {problem}: choose one of {", ".join(CARDS)}; or "emulated 2GB" for memory of this machine; or, in '
        "Python, give a GpuCard with the figures of another card"
    )


def cards_table() -> list[tuple[str, ...]]:
    """Return the rows of the table of cards: name, memory, TFLOP/s, memory and link speed, source."""
    return [
        (
            card.name,
            format_bytes(card.memory_bytes),
            *(f"{card.flops_per_s[precision] / 1e12:g}" for precision in ("bf16", "fp32")),
            f"{format_bytes(card.memory_bytes_per_s)}/s",
            f"{format_bytes(card.link_bytes_per_s)}/s",
            card.source,
        )
        for card in CARDS.values()
    ]
