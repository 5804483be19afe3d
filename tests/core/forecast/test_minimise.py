"""Compare the search for settings with all settings of small spaces, whose bytes and seconds are ordered as it requires."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product

import pytest

from l2l_core import RelayConfig
from l2l_core.forecast import MemoryLimits, Priced, Run
from l2l_core.forecast.minimise import Space, minimise

COUNTS = (8, 4, 2, 1)
CHOICES = [{"ahead": ahead, "stash": stash} for ahead in (1, 2, 0) for stash in ("device", "host")]


def rising(draw: random.Random, n: int, most: int) -> list[int]:
    return [*accumulate(draw.randint(0, most) for _ in range(n))]


class RandomPrices:
    """Random bytes and seconds of steps, in the order of a space; records the priced steps."""

    def __init__(self, seed: int, keeps: int = 7, residents: int = 6) -> None:
        draw = random.Random(seed)
        self.known: dict[RelayConfig, Priced] = {}
        self.keeps, self.residents = keeps, residents
        graph, weight, rows = (rising(draw, n, 40) for n in (keeps, residents, len(COUNTS)))
        place = {(each["ahead"], each["stash"]): (draw.randint(1, 60), 1 + 0.1 * at) for at, each in enumerate(CHOICES)}
        spared = [rising(draw, n, 10) for n in (keeps, residents, len(COUNTS))]

        def make(config: RelayConfig) -> Priced:
            keep, resident, at = int(config.keep), config.resident, COUNTS.index(config.micro_batches)
            taken, slow = place[config.ahead, config.stash]
            nbytes = taken + graph[keep] + weight[resident] + rows[at] + keep * resident
            saved = [each[index] for each, index in zip(spared, (keep, resident, at), strict=True)]
            return Priced(config, nbytes, lambda: Run(slow * (300 - sum(saved)), 0))

        self.make = make

    def __call__(self, config: RelayConfig) -> Priced:
        if config not in self.known:
            self.known[config] = self.make(config)
        return self.known[config]

    def space(self, counts: tuple[int, ...] = COUNTS, apart: bool = True) -> Space:
        keeps = [{"keep": keep} for keep in range(self.keeps)]
        residents = [{"resident": resident} for resident in range(self.residents)]
        tiers = [[choice] for choice in CHOICES] if apart else [CHOICES]
        return Space(start=RelayConfig(), counts=counts, tiers=tiers, growing=[keeps, residents])

    def all(self) -> Iterator[Priced]:
        for count, choice, keep, resident in product(COUNTS, CHOICES, range(self.keeps), range(self.residents)):
            yield self.make(RelayConfig(micro_batches=count, keep=keep, resident=resident, **choice))  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [True, False])
def test_every_step_found_fits_and_the_first_is_the_best(apart: bool) -> None:
    tried = there = 0
    for seed in range(20):
        made = RandomPrices(seed)
        every = sorted(made.all(), key=lambda step: step.budget_bytes)
        for share in range(9):
            made.known.clear()
            room = MemoryLimits(every[len(every) * share // 9].budget_bytes - (share == 0), None)
            counts = COUNTS if share % 2 else (2, 8, 4, 1)  # 2 is the present number
            found = minimise(made, made.space(counts, apart), room.fits)
            fitting = [step.seconds for step in every if room.fits(step)]
            assert found.all_tried and bool(found.steps) == bool(fitting)
            assert all(room.fits(step) for step in found.steps)
            assert [step.seconds for step in found.steps] == sorted(step.seconds for step in found.steps)
            assert [step.seconds for step in found.steps[:1]] == sorted(fitting)[:1]
            tried, there = tried + len(made.known), there + len(every)
    assert tried < there / 8


@pytest.mark.parametrize("most", [2, 5, 12, 40])
def test_few_steps_are_priced(most: int) -> None:
    """One setting is bisected; with two, the edge of the settings that fit is followed."""
    for seed in range(10):
        for growing in (1, 2):
            made = RandomPrices(seed, most, most if growing == 2 else 1)
            space = replace(made.space((8,)), tiers=[[CHOICES[0]]])
            every = sorted({made(c.config).budget_bytes for c in made.all() if c.config.micro_batches == 8})
            made.known.clear()
            minimise(made, space, MemoryLimits(every[len(every) // 2], None).fits)
            assert len(made.known) <= (2 * most.bit_length() + 2 if growing == 1 else 6 * most)


def test_without_a_budget_the_least_bytes_are_found() -> None:
    """Numbers of micro-batches are tried until the bytes increase."""
    made = RandomPrices(3)
    space = replace(made.space(), tiers=[[CHOICES[0]]], growing=[])
    found = minimise(made, space, None, lambda step: step.device_bytes)
    assert found.steps[0].device_bytes == min(step.device_bytes for step in map(made.make, made.known))
    assert [config.micro_batches for config in made.known] == [8, 4]


def test_after_a_step_that_cannot_run_larger_micro_batches_are_tried() -> None:
    """Some models need two rows; if larger micro-batches fail too, the device may be too small."""
    made, priced = RandomPrices(4), []

    def price(config: RelayConfig) -> Priced | None:
        priced.append(config.micro_batches)
        return made(config) if config.micro_batches == 4 else None

    found = minimise(price, replace(made.space(), tiers=[[CHOICES[0]]], growing=[]), lambda step: True)
    assert [step.config.micro_batches for step in found.steps] == [4]
    assert [*dict.fromkeys(priced)] == [8, 4, 2], "not 1"


def test_the_search_ends_when_its_time_is_up_and_something_was_found() -> None:
    made = RandomPrices(5)
    found = minimise(made, made.space(), lambda step: True, until_s=-1.0)
    assert not found.all_tried and {step.config.micro_batches for step in found.steps} == {8}
    assert minimise(made, made.space(), lambda step: False, until_s=-1.0) == ([], True)
