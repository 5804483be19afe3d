"""A user's program, run twice: with plain PyTorch, and by relay.

A case is a function of a `Side`. It trains by `Side.training`, or reports what a trainer has trained by `Side.trained`. What it
returns is compared, too.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from _children import first_line
from _clients_compare import differences, plain_values, settings_in, state_of
from torch import nn

import l2l_core
from l2l_core import Relay, RelayConfig, TornStep

GOOD, BAD = ("equal", "refused"), ("different", "torn", "failed", "crashed", "timed out", "nothing trained")
CONFIG = RelayConfig(micro_batches=2, stash="host", seed=0)


@dataclass
class Outcome:
    """Outcome of a case.

    Attributes:
        kind: one of `GOOD` and `BAD`, or "not installed".
        remedy: a remedy that the message of a refusal names, and with which the case is equal.
        reason: message of a refusal, or difference.
    """

    kind: str
    remedy: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass
class Case:
    """A user's program.

    Attributes:
        subject: the table of counts has one row for each.
        library: name of its distribution.
        what: its use beside the relay.
        program: the function of a `Side`.
        remedy: part of the message of a refusal; a second run has ``side.is_remedied`` and must be equal. If it is empty,
            a second run has the settings of the ``RelayConfig(...)`` in the message, if it has one.
    """

    subject: str
    library: str
    what: str
    program: Callable[[Side], Any]
    remedy: str = ""


CASES: list[Case] = []


def case(subject: str, library: str, what: str, remedy: str = "") -> Callable[[Callable[[Side], Any]], Any]:
    """Register a case."""

    def register(program: Callable[[Side], Any]) -> Callable[[Side], Any]:
        CASES.append(Case(subject, library, what, program, remedy))
        return program

    return register


class DefectiveCase(Exception):
    """The program fails, or trains nothing, without a relay."""


# -- one side --------------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """One run of a program.

    Attributes:
        is_relay: whether the relay trains.
        config: settings of the relay; with these seeds the plain side draws its random numbers.
        is_remedied: whether the program follows the remedy of a refusal.
        folder: an empty one.
        losses: of all steps.
    """

    is_relay: bool
    folder: Path
    config: RelayConfig = CONFIG
    is_remedied: bool = False
    losses: list[float] = field(default_factory=list)
    _watched: list[tuple[nn.Module, dict[str, torch.Tensor]]] = field(default_factory=list)
    _optimizers: list[Any] = field(default_factory=list)

    @contextmanager
    def training(self, model: nn.Module, optimizer: Any, **options: Any) -> Iterator[Callable[[Any], float]]:
        """Yield a function that makes an optimizer step on a batch and returns the loss; options are those of `Relay`."""
        self.watch(model)
        self._optimizers += optimizer if isinstance(optimizer, list) else [optimizer]
        if not self.is_relay:
            plain = PlainLoop(model, optimizer, self.config, **options)
            yield lambda batch: self._noted(plain.step(batch))
            return
        with Relay(model, optimizer, options.pop("device", "cpu"), config=self.config, **options) as relay:
            yield lambda batch: self._noted(relay.step(batch).loss)

    def watch(self, model: nn.Module, instead_of: nn.Module | None = None) -> None:
        """Keep a model's weights as they are before training."""
        self._watched = [pair for pair in self._watched if pair[0] is not instead_of]
        self._watched.append((model, state_of(model)))

    def trained(self, optimizer: Any, losses: Iterable[float]) -> None:
        """Keep the results of a trainer whose model was given to `watch`."""
        self._optimizers.append(optimizer)
        self.losses += losses

    def results(self, returned: Any) -> dict[str, Any]:
        """Return everything that is compared."""
        return {
            "loss": list(self.losses),
            "model": [state_of(model) for model, _ in self._watched],
            "optimizer": [plain_values(each.state_dict()) for each in self._optimizers],
            "returned value": returned,
        }

    @property
    def has_changed(self) -> bool:
        """Whether a watched model has other weights than before."""
        return any(differences(before, state_of(model)) for model, before in self._watched)

    def _noted(self, loss: float) -> float:
        self.losses.append(loss)
        return loss


class PlainLoop:
    """The same optimizer steps with torch alone."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        config: RelayConfig,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        objective: Callable[[nn.Module, Any], torch.Tensor] | None = None,
        **others: Any,  # of the relay alone
    ) -> None:
        self.model, self.config, self.loss, self.objective = model, config, loss, objective
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.steps = 0

    def step(self, batch: Any) -> float:
        """Accumulate the gradients of all micro-batches, then step."""
        parts = cut(batch, self.config.micro_batches)
        total = torch.zeros(())
        for k, part in enumerate(parts):
            with seeded(self.config.micro_batch_seed(self.steps, k)):
                loss = self._loss(part) / len(parts)
                loss.backward()
            total += loss.detach()
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.model.zero_grad()
        self.steps += 1
        return float(total)

    def _loss(self, part: Any) -> torch.Tensor:
        if self.objective is not None:
            return self.objective(self.model, part)
        if isinstance(part, Mapping):
            outputs = self.model(**part)
        else:
            outputs = self.model(*(part if self.loss is None else part[:-1]))
        if self.loss is None:
            return outputs.loss
        return self.loss(outputs, part[-1] if isinstance(self.loss, nn.Module) else part)


def cut(batch: Any, count: int) -> list[Any]:
    """Cut tensors along their rows."""
    if count == 1:
        return [batch]
    if isinstance(batch, Mapping):
        parts = [value.chunk(count) for value in batch.values()]
        return [dict(zip(batch, each, strict=True)) for each in zip(*parts, strict=True)]
    return list(zip(*(value.chunk(count) for value in batch), strict=True))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw random numbers from a seed for the length of a block."""
    before = random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed), random.seed(seed)
        yield
    random.setstate(before)


# -- comparison ------------------------------------------------------------------------------------------------------


def judge(of: Case, folder: Path) -> Outcome:
    """Run a program on both sides and compare."""
    try:
        expected = run_program(of, Side(is_relay=False, folder=made(folder / "plain")))
    except ImportError as error:  # of a second library
        return Outcome("not installed", reason=first_line(error))
    except Exception as error:
        return Outcome("failed", reason=f"without a relay: {type(error).__name__}: {first_line(error)}")
    found = compared(of, Side(is_relay=True, folder=made(folder / "relay")), expected)
    if found.kind != "refused":
        return found
    changes = settings_in(found.reason)
    if of.remedy and of.remedy not in found.reason:
        return Outcome("failed", reason=f"the refusal does not name {of.remedy!r}: {found.reason}")
    if not of.remedy and not changes:
        return found
    if changes.get("schedule") == "depth_first":
        changes["stash"] = "device"  # the only place with it, as the next refusal would say
    again = {"is_remedied": True} if of.remedy else {"config": replace(CONFIG, **changes)}
    plain = Side(is_relay=False, folder=made(folder / "plain again"), **again)
    second = compared(of, Side(is_relay=True, folder=made(folder / "relay again"), **again), run_program(of, plain))
    shown = of.remedy or f"RelayConfig({', '.join(f'{k}={v!r}' for k, v in changes.items())})"
    if second.kind == "equal":
        return Outcome("refused", shown, found.reason)
    kind = second.kind if second.kind in BAD else "failed"
    return Outcome(kind, reason=f"with {shown}, the remedy of a refusal: {second.reason}")


def run_program(of: Case, side: Side) -> dict[str, Any]:
    """Run a program from one seed; return its results."""
    torch.manual_seed(0), random.seed(0), numpy.random.seed(0)
    with torch.random.fork_rng(devices=[]):
        results = side.results(plain_values(of.program(side)))
    if not side.is_relay and not side.has_changed:
        raise DefectiveCase("it trains nothing")
    return results


def compared(of: Case, side: Side, expected: dict[str, Any]) -> Outcome:
    """Run a program by relay and compare its results with those of plain training."""
    try:
        found = run_program(of, side)
    except TornStep as error:
        return Outcome("torn", reason=first_line(error))
    except Exception as error:
        words = ". ".join([str(error), *(note for note in getattr(error, "__notes__", []) if "RelayConfig(" in note)])
        message = f"{type(error).__name__}: {' '.join(words.split())}"
        clear = isinstance(error, ValueError | TypeError | RuntimeError) and is_of_relay(error)
        if clear and not side.losses and not side.has_changed:
            return Outcome("refused", reason=message[:1500])
        return Outcome("failed", reason=f"{message[:600]} (after {len(side.losses)} steps, {place_of(error)})")
    if not side.has_changed:
        return Outcome("nothing trained")
    wrong = differences(expected, found)
    return Outcome("different", reason="; ".join(wrong[:4])[:600]) if wrong else Outcome("equal")


def is_of_relay(error: BaseException) -> bool:
    """Return whether the relay's own code has raised an error."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = Path(l2l_core.__file__).parent in Path(last.filename).parents
    return ours and (last.line or "").startswith("raise ")  # not an error of the interpreter


def place_of(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder
