"""A step without effect on a few micro-batches: what it costs, and what it leaves in memory turn by turn.

The model's own forward and the relay's own loop run over all layers, on a device without limits and a link without
limits, with an EPS that updates scratch copies (`dry.py`). What it is not: a simulation. Nothing of the relay changes;
forward hooks of the user's own do run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from l2l_core.config import RelayConfig
from l2l_core.device import Device
from l2l_core.dry import DryStore
from l2l_core.emulated import EmulatedDevice
from l2l_core.loop import TrainLoop
from l2l_core.memory import Ledger
from l2l_core.meter import Metered
from l2l_core.profile import Profile
from l2l_core.stage import Parts, Stage, Task
from l2l_core.store import LayerStore
from l2l_core.trace import Trace
from l2l_core.units import Unit
from l2l_core.wire import Wires

ENOUGH_S = 2.0  # timed passes are repeated until they have taken so long together,
MOST_PASSES = 5  # or there are so many


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a rehearsal found.

    Attributes:
        profile: costs of the pass of median length.
        around_s: seconds of a step before its first event and after its last one.
        state_bytes: of the optimizer after a step.
        passes: timed ones.
        seconds: what the rehearsal took.
    """

    profile: Profile
    around_s: float
    state_bytes: int
    passes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A relay's parts, as a rehearsal needs them."""

    parts: Parts
    store: LayerStore
    predicted: Sequence[Unit]
    objective: Task
    shares: Callable[[Sequence[Any]], list[float]]

    def run(self, micro_batches: Sequence[Any], config: RelayConfig) -> Rehearsed:
        """Rehearse these micro-batches under `config`, once metered, then timed."""
        began_s = time.perf_counter()
        device, host = _unlimited(self.parts.device), Ledger("host", "Host memory")
        parts = replace(self.parts, device=device, host=host, wires=Wires(device, host))
        dry = DryStore(self.store, host, device.host_empty)
        config = replace(config, micro_batches=len(micro_batches), seed=0)
        blocks = list(dict.fromkeys(block for unit in parts.units for block in unit.blocks))
        wires = [block.wire for block in blocks]
        peak, limit_bytes = device.ledger.peak, device.ledger.limit_bytes
        device.ledger.limit_bytes = None  # what does not fit is what a forecast is asked for
        put_buffers_back = parts.copy_buffers()
        try:
            with device.current():
                expected = self.predicted
                _, learned, _, way = self._pass(parts, dry, micro_batches, config, None, expected)
                if way != list(expected):  # layers that are visited twice, say: then prefetch learns, and so do we
                    put_buffers_back()
                    _, learned, _, way = self._pass(parts, dry, micro_batches, config, None, way)
                replayed = None if config.meter == "always" else learned
                timed: list[tuple[Trace, float]] = []
                while not timed or (len(timed) < MOST_PASSES and sum(s for _, s in timed) < ENOUGH_S):
                    put_buffers_back()
                    trace, _, seconds, _ = self._pass(parts, dry, micro_batches, config, replayed, way)
                    timed.append((trace, seconds))
        except BaseException:
            dry.roll_back()
            raise
        finally:
            put_buffers_back()
            parts.wires.close()
            for block, wire in zip(blocks, wires, strict=True):
                block.wire = wire
            for param in parts.model.parameters():
                param.grad = None
            device.ledger.limit_bytes, device.ledger.peak = limit_bytes, max(peak, device.ledger.total)
            if device is not self.parts.device:
                device.close()
        trace, seconds = sorted(timed, key=lambda one: one[0].span_s)[len(timed) // 2]
        known = {block: self.store.side_of(block).nbytes for block in blocks} | dry.state_bytes
        return Rehearsed(
            profile=Profile.of(trace),
            around_s=max(0.0, seconds - trace.span_s),
            state_bytes=sum(known.values()),
            passes=len(timed),
            seconds=time.perf_counter() - began_s,
        )

    def _pass(
        self,
        parts: Parts,
        dry: DryStore,
        micro_batches: Sequence[Any],
        config: RelayConfig,
        replay: Metered | None,
        predicted: Sequence[Unit],
    ) -> tuple[Trace, Metered, float, list[Unit]]:
        """One step without effect: its trace, what it learned, its seconds, and the way it went."""
        began_s = time.perf_counter()
        settings = {**asdict(config), **parts.device.figures()}
        trace = Trace(device=parts.device.name, names=parts.names, settings=settings)
        seeds = [config.micro_batch_seed(0, k) for k in range(len(micro_batches))]
        dry.begin(config, trace)
        with Stage(parts, config, trace, replay) as stage:
            forwards = stage.forwards(micro_batches, self.objective, seeds)
            loop = TrainLoop(stage.run, forwards, parts.layers, predicted, stage.prefetch)
            loop.train(dry, *stage.gradients(), stage.pushes, self.shares(micro_batches), parts.inside())
            dry.finish()
            stage.stash.drain()
            stage.meter.sample()
        return trace, stage.learned(), time.perf_counter() - began_s, [visit.unit for visit in loop.visits]


def _unlimited(device: Device) -> Device:
    """The same kind of device without a budget and with the fastest link; a real one is what it is."""
    return EmulatedDevice() if isinstance(device, EmulatedDevice) else device


def representatives(forms: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Which micro-batches of a step to rehearse, and which of those stands for each.

    Micro-batches of one form in a row are alike but for the first two, that find the pipeline filling, and the very last.

    Args:
        forms: shapes of every micro-batch.

    Returns:
        Indices into `forms`; and for each micro-batch the position in them.
    """
    chosen: list[int] = []
    stands: list[int] = []
    start = 0
    for k, form in enumerate(forms):
        if form != forms[start]:
            start = k
        if k - start < 3 or k == len(forms) - 1:
            chosen.append(k)
        stands.append(len(chosen) - 1)
    return chosen, stands
