"""Settings of a relay: one frozen value, validated once."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

StashLocation = Literal["device", "host", "disk"]
MEMORY_STASHES: tuple[StashLocation, ...] = ("device", "host")  # what any relay has, and what a search tries
UpdateMode = Literal["eager", "deferred"]
Precision = Literal["fp32", "bf16"]
MeterMode = Literal["on_change", "always"]
WireFormat = Literal["bf16", "int8", "int4"]
Schedule = Literal["breadth_first", "depth_first"]

_UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_BYTES = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})")


@dataclass(frozen=True)
class Compress:
    """In how few bits gradients go to the host, and what becomes of what that leaves out.

    A gradient ``g`` that is pushed whole goes as ``Q(g)``: "bf16" in 2 bytes per element; "int8" and "int4" as whole numbers
    from -127 to 127, or from -7 to 7, two to a byte, of steps of which each 256 elements of a parameter, as they lie in memory,
    have their own: a 127th, or a 7th, of the largest magnitude among them, one float32. Gradients that are kept apart by
    micro-batch (parameters that several units share, layers that are visited several times, a shell whose parts share
    parameters, as a tied embedding) go in float32 as without compression.

    Attributes:
        format: "bf16", "int8" or "int4".
        feedback: whether the device keeps what was left out, ``e``, and adds it to the next gradient: it sends ``Q(g + e)`` and
            keeps ``g + e - Q(g + e)`` (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847), rounded to nearest.
            That is 4 bytes on the device for every trained parameter whose gradient is compressed, so device memory grows with
            depth; and as much again while a step runs, so that one that fails can be taken back: of all of them where a step is
            taken back as a whole (``update="deferred"``, ``rollback=True``), otherwise of the three largest. Without
            feedback nothing stays on the device, and rounding is at random, with the right mean (QSGD: Alistarh et al., arXiv
            1610.02132); the numbers are a function of seed, step, block and element.

    Raises:
        ValueError: no such format, or a feedback that is neither True nor False.
    """

    format: WireFormat
    feedback: bool = True

    def __post_init__(self) -> None:
        _check_choice("compress", self.format, WireFormat)
        if not isinstance(self.feedback, bool):
            raise ValueError(f"feedback={self.feedback!r}: must be True or False")

    @staticmethod
    def of(value: Compress | Mapping[str, Any] | str | None) -> Compress | None:
        """Read what settings say: all of it, a mapping of its fields as saves have it, or a format alone."""
        if value is None or isinstance(value, Compress):
            return value
        return Compress(**value) if isinstance(value, Mapping) else Compress(value)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """How a relay runs; what it computes does not depend on these settings, but for `precision` and `compress`.

    Args:
        micro_batches: slices of a batch that pass through a layer during one visit.
        ahead: layers loaded ahead of the one that computes. 1 or more overlap copies and updates with compute (L2L-p). 0 is
            serial (plain L2L): each is waited for at once, and on an emulated device done by the thread that computes, on all its
            cores. On a CPU without a link, whose copies take the cores that compute wants, small layers are faster so.
        resident: further layers for which the device has room. The last ``ahead + 1 + resident`` layers of forward are still
            there when backward comes to them, and are not loaded again.
        keep: of how many of the last layers the graphs of all micro-batches are kept until backward, so that these are not
            recomputed. It costs their activations, and is possible for as many layers as stay: at most
            ``ahead + 1 + resident``. Or how much of the device they may take, as text: ``"500 MB"``, ``"1.5 GiB"``. The relay
            then finds out by rehearsals how many layers that are, before the first step of a kind.
        stash: where boundary activations wait for their recompute. On the ``"host"``, device memory does not grow
            with depth or with the number of micro-batches. On the ``"disk"``, host memory does not either: they pass through a
            few buffers to a scratch file in the folder of a `FileShelf`, which the relay must have.
        schedule: what comes first. ``"breadth_first"``, the relay: a layer runs all micro-batches before it gives way.
            ``"depth_first"``, as plain accumulation does: a micro-batch runs through all layers, and back, before the next one
            begins. So nothing gives way: all layers stay with their graphs, however many there are and whatever `resident` and
            `keep` say. It costs the least time, has the graph of one micro-batch at a time, and the gradients of all layers at
            once, 4 bytes per trained parameter. For one worker, with weights in memory and the stash on the device.
        update: ``"eager"`` updates each layer as soon as its gradient arrives; ``"deferred"`` waits for all of them, as step
            hooks of the optimizer need.
        precision: ``"fp32"``, or ``"bf16"`` for bfloat16 weights on the device and compute under autocast. Masters,
            gradient sums and the optimizer stay float32.
        max_grad_norm: clip the global gradient norm to this; needs ``update="deferred"``.
        compress: gradients go to the host in fewer bits: ``"bf16"``, ``"int8"``, ``"int4"``, or a `Compress`, which says whether
            the device keeps what that leaves out; the formats alone say that it does. None for float32. If settings are
            exchanged for some without feedback, what the device has kept goes with the next step. Not with several workers or
            weights in files, and with feedback not with branches.
        meter: when activation bytes are counted operation by operation: the first step after a change, or every step.
        rollback: keep an undo log of eager updates (12 bytes per parameter) so that an exception restores the old step.
        seed: start of every random stream, see `micro_batch_seed`.

    Raises:
        ValueError: a value out of range, or ``eager`` together with ``max_grad_norm``.
    """

    micro_batches: int = 1
    ahead: int = 1
    resident: int = 0
    keep: int | str = 0
    stash: StashLocation = "device"
    schedule: Schedule = "breadth_first"
    update: UpdateMode = "eager"
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    compress: Compress | WireFormat | None = None
    meter: MeterMode = "on_change"
    rollback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_int("micro_batches", self.micro_batches, least=1)
        _check_int("ahead", self.ahead, least=0)
        _check_int("resident", self.resident, least=0)
        if isinstance(self.keep, str):
            parse_bytes(self.keep, "keep", "layers, as 4, or of ")
        else:
            _check_int("keep", self.keep, least=0)
        _check_int("seed", self.seed, least=0)
        _check_choice("stash", self.stash, StashLocation)
        _check_choice("schedule", self.schedule, Schedule)
        _check_choice("update", self.update, UpdateMode)
        _check_choice("precision", self.precision, Precision)
        _check_choice("meter", self.meter, MeterMode)
        if isinstance(self.compress, Mapping):  # as saves have it
            object.__setattr__(self, "compress", self.wire)
        self.wire  # noqa: B018 - for what it refuses
        if not isinstance(self.rollback, bool):
            raise ValueError(f"rollback={self.rollback!r}: must be True or False")
        if self.schedule == "depth_first" and (isinstance(self.keep, str) or self.stash != "device"):
            raise ValueError(
                f"schedule='depth_first' with keep={self.keep!r}, stash={self.stash!r}: micro-batches that run one after "
                "another have all their graphs on the device, and nothing waits elsewhere. Leave keep out, with stash='device'"
            )
        if self.max_grad_norm is None:
            return
        if not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm!r}: must be a positive number, or None for no clipping"
            )
        if self.update == "eager":
            raise ValueError(
                f"max_grad_norm={self.max_grad_norm!r} with update='eager': the global norm needs every gradient before "
                "the first update, and eager updates do not wait. Use RelayConfig(update='deferred', ...)"
            )

    @property
    def wire(self) -> Compress | None:
        """How gradients are compressed, in whole; None where they are not."""
        return Compress.of(self.compress)

    def for_layers(self, layers: int) -> RelayConfig:
        """Return the settings of a step over so many layers: depth first, all of them stay."""
        if self.schedule == "breadth_first":
            return self
        return replace(self, keep=layers, resident=max(0, layers - self.ahead - 1))

    def micro_batch_seed(self, step: int, k: int) -> int:
        """Return the seed of the random stream of micro-batch `k` in step `step` (both from 0).

        A plain loop that calls ``torch.manual_seed`` with it before each micro-batch draws the same numbers.
        """
        return zlib.crc32(f"{self.seed}/{step}/{k}".encode())  # `hash` of text differs from process to process


def parse_bytes(text: str, name: str, alternative: str = "") -> int:
    """Return the bytes that a setting says in words, as "500 MB" or "1.5 GiB".

    Args:
        text: that it says.
        name: of the setting, for the error.
        or_of: of what else it may be a number, in words.

    Raises:
        ValueError: it says no number of bytes.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{name}={text!r}: must be a number of {alternative}bytes with a unit ({', '.join(_UNITS)}), as '500 MB'"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def checked_config(config: object, has_disk: bool) -> RelayConfig:
    """Return the settings if they are some, and if a relay can have them that has a shelf on disk, or none.

    Raises:
        TypeError: they are no settings.
        ValueError: there is nowhere for the stash.
    """
    if not isinstance(config, RelayConfig):
        raise TypeError(
            f'config={config!r}: give a RelayConfig, or "auto" to a new relay so that it looks for settings itself'
        )
    if config.stash == "disk" and not has_disk:
        raise ValueError(
            "stash='disk' lies in a scratch file of a shelf's folder, and this relay has no shelf: give "
            "Relay(shelf=FileShelf(folder=..., memory_bytes=...)), or RelayConfig(stash='host')"
        )
    return config


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:  # to Python, True is a number
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")


def _check_choice(name: str, value: object, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(choices)))}")
