"""Settings of a relay: one frozen value, validated when it is made."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from l2l_core.plan import ScheduleFunction, StepPlan, schedule_name
from l2l_core.trace import parse_bytes

StashLocation = Literal["device", "host", "disk"]
MEMORY_STASHES: tuple[StashLocation, ...] = ("device", "host")  # for any relay, and for searches
UpdateMode = Literal["eager", "deferred", "whole"]
Precision = Literal["fp32", "bf16"]
MeterMode = Literal["on_change", "always"]
WireFormat = Literal["bf16", "int8", "int4"]
ScheduleName = Literal["breadth_first", "depth_first"]


@dataclass(frozen=True)
class Compress:
    """Compression of gradients on the way to the host.

    A gradient ``g`` is sent as ``Q(g)``. "bf16" takes 2 bytes per element. "int8" and "int4" send integers from -127 to 127, or
    from -7 to 7 (two per byte), and one float32 scale per 256 elements of a parameter in memory order: their largest magnitude,
    divided by 127 or 7. Per-micro-batch gradients (of parameters that several units share, layers with several visits, a shell
    with a tied embedding) are sent in float32.

    Attributes:
        format: "bf16", "int8" or "int4".
        feedback: keep the rounding error ``e`` on the device and add it to the next gradient: send ``Q(g + e)``, keep
            ``g + e - Q(g + e)``, rounded to nearest (Seide et al., Interspeech 2014; Karimireddy et al., arXiv 1901.09847). This
            takes 4 bytes on the device per trained parameter with a compressed gradient, so device memory grows with depth; and
            as much again during a step, to undo it: for all blocks with ``update="deferred"`` or ``rollback=True``, otherwise for
            the three largest. Without feedback nothing stays on the device, and rounding is stochastic and unbiased (QSGD:
            Alistarh et al., arXiv 1610.02132), determined by seed, step, block and element.

    Raises:
        ValueError: an unknown format, or a feedback other than True and False.

    Example:
        >>> from l2l_core import Compress
        >>> relay.config = RelayConfig(micro_batches=2, compress=Compress("int8", feedback=False))
        >>> result = relay.step(batch)
        >>> result.verified  # such gradients differ
        'not compared with training in core: compressed gradients are rounded'
    """

    format: WireFormat
    feedback: bool = True

    def __post_init__(self) -> None:
        _check_choice("compress", self.format, WireFormat)
        _check_bool("feedback", self.feedback)

    @staticmethod
    def of(value: Compress | Mapping[str, Any] | WireFormat | None) -> Compress | None:
        """Convert a setting: a `Compress`, a mapping of its fields (as in saves), a format, or None."""
        if value is None or isinstance(value, Compress):
            return value
        return Compress(**value) if isinstance(value, Mapping) else Compress(value)


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """Settings of a relay. Results equal plain training to the bit, except with ``precision="bf16"`` or `compress`.

    Args:
        micro_batches: number of slices of a batch; each layer runs all of them during one visit.
        ahead: layers loaded ahead of the one that computes. With 1 or more, copies and updates overlap with compute (L2L-p).
            With 0 each is waited for (plain L2L), and on an emulated device the computing thread does it, on all its cores. On
            a CPU without a link, where copies compete for the cores, 0 is faster for small layers.
        resident: further weight slots. The last ``ahead + 1 + resident`` layers of forward are still on the device when
            backward begins, and are not loaded again.
        keep: number of last layers whose graphs stay on the device until backward instead of being recomputed, at most
            ``ahead + 1 + resident``. It costs their activations for all micro-batches. Or the device bytes for them, as text:
            ``"500 MB"``, ``"1.5 GiB"``; the relay then finds the number of layers by rehearsals, before the first step of a kind.
        stash: where boundary activations wait for the recompute. With ``"host"``, device memory does not grow with depth or
            with the number of micro-batches. With ``"disk"``, host memory does not either: they are written through a few
            buffers to a scratch file in the folder of the relay's `FileShelf`, which is required.
        schedule: ``"breadth_first"``, the relay: a layer runs all micro-batches before the next layer. ``"depth_first"``, plain
            accumulation: a micro-batch runs through all layers and back before the next one. All layers then stay on the
            device, with the graph of one micro-batch and the gradients of all layers (4 bytes per trained parameter); `resident`
            and `keep` have no effect. It is the fastest. For one worker, with weights in memory and ``stash="device"``.
            Or a schedule of your own: a function ``schedule(settings, visits)`` that is called before each step with
            `ScheduleSettings` and the keys of the layers in the order of forward, and yields the `Action` values of the step; or
            a `StepPlan`, for batches of one size. Its plan is checked before anything runs, see docs/PLANS.md. For one worker.
        update: ``"eager"`` updates each layer as soon as its gradient arrives; ``"deferred"`` waits for all gradients, as step
            hooks of the optimizer require. ``"whole"`` then calls the optimizer's ``step()`` once, as a plain loop does: for an
            optimizer that couples layers (a norm over all gradients, Prodigy, D-Adaptation, LAMB), or whose ``step`` was
            replaced; for one worker, with weights in memory.
        precision: ``"fp32"``, or ``"bf16"`` for bfloat16 weights on the device and compute under autocast. Masters,
            gradient sums and the optimizer stay float32.
        max_grad_norm: clip the global gradient norm to this; needs ``update="deferred"`` or ``"whole"``.
        compress: send gradients to the host in fewer bits: ``"bf16"``, ``"int8"``, ``"int4"`` (all with feedback), or a
            `Compress`. None for float32. After a change to settings without feedback, kept rounding errors are added to the next
            gradient. Not with several workers or weights in files; feedback not with branches.
        meter: count activation bytes operation by operation in the first step after a change (``"on_change"``), or in every
            step (``"always"``).
        rollback: keep an undo log of eager updates (12 bytes per parameter), so that an exception restores the state before the
            step.
        seed: seed of all random streams, see `micro_batch_seed`. None: that of PyTorch when the relay is made
            (``torch.initial_seed()``, worker 0's), so that ``torch.manual_seed`` before it decides; `Relay.config` has it.
            Saves keep it, the files of a shelf do not.
        verify: which steps are compared with the same step in core, as `Relay.verify` does: ``"first"``, the first with these
            settings, layers and types of batch; ``"never"``; or n, every n-th. It takes a step in core more, and for that time
            the memory of training in core. A step that differs is undone and refused.
            `StepResult.verified` has the result, or why it was left out: on a GPU, with `precision="bf16"`, `compress`, several
            workers, weights in files or step hooks, or without the memory.

    Raises:
        ValueError: a value out of range, or ``eager`` together with ``max_grad_norm``.

    Example:
        >>> from dataclasses import replace
        >>> config = RelayConfig(micro_batches=4, ahead=2, stash="host")
        >>> replace(config, update="deferred", max_grad_norm=1.0).max_grad_norm
        1.0
        >>> RelayConfig(micro_batches=0)
        Traceback (most recent call last):
        ValueError: micro_batches=0: must be an integer of at least 1
    """

    micro_batches: int = 1
    ahead: int = 1
    resident: int = 0
    keep: int | str = 0
    stash: StashLocation = "device"
    schedule: ScheduleName | ScheduleFunction | StepPlan = "breadth_first"
    update: UpdateMode = "eager"
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    compress: Compress | WireFormat | None = None
    meter: MeterMode = "on_change"
    rollback: bool = False
    seed: int | None = None
    verify: Literal["first", "never"] | int = "first"

    def __post_init__(self) -> None:
        check_int("micro_batches", self.micro_batches, least=1)
        for name in ("ahead", "resident"):
            check_int(name, getattr(self, name), least=0)
        if self.seed is not None:
            check_int("seed", self.seed, least=0)
        if isinstance(self.verify, str) and self.verify not in ("first", "never"):
            raise ValueError(f"verify={self.verify!r}: must be 'first', 'never', or n for every n-th step")
        if not isinstance(self.verify, str):
            check_int("verify", self.verify, least=1)
        if isinstance(self.keep, str):
            parse_bytes(self.keep, "keep", "layers, as 4, or of ")
        else:
            check_int("keep", self.keep, least=0)
        _check_choice("stash", self.stash, StashLocation)
        self._check_schedule()
        _check_choice("update", self.update, UpdateMode)
        _check_choice("precision", self.precision, Precision)
        _check_choice("meter", self.meter, MeterMode)
        wire = self.wire  # raises if it is not valid
        if isinstance(self.compress, Mapping):  # as in saves
            object.__setattr__(self, "compress", wire)
        _check_bool("rollback", self.rollback)
        if self.has_own_schedule and not isinstance(self.schedule, StepPlan) and isinstance(self.keep, str):
            raise ValueError(
                f"keep={self.keep!r} with schedule={schedule_name(self.schedule)}: the layers that fit in these bytes are found "
                "with the relay's own schedule. Give keep= as a number of layers"
            )
        if self.schedule == "depth_first" and (isinstance(self.keep, str) or self.stash != "device"):
            raise ValueError(
                f"schedule='depth_first' with keep={self.keep!r}, stash={self.stash!r}: it keeps all graphs of a micro-batch on "
                "the device, and no micro-batch waits elsewhere. Leave keep out, with stash='device'"
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

    def _check_schedule(self) -> None:
        if isinstance(self.schedule, str) and self.schedule.startswith("plan "):  # as in saves
            object.__setattr__(self, "schedule", StepPlan.parse(self.schedule))
        if not isinstance(self.schedule, StepPlan) and not callable(self.schedule):
            _check_choice("schedule", self.schedule, ScheduleName, ", a function of settings and visits, or a StepPlan")

    def __repr__(self) -> str:
        return f"RelayConfig({', '.join(self._texts())})"

    def differences(self) -> list[str]:
        """List the settings that are not the defaults, as ``"micro_batches=4"``."""
        return [text for text, default in zip(self._texts(), RelayConfig()._texts(), strict=True) if text != default]

    def _texts(self) -> list[str]:
        values = {each.name: repr(getattr(self, each.name)) for each in fields(self)}
        if self.has_own_schedule:  # by name: an address differs between processes, and a plan has many lines
            values["schedule"] = schedule_name(self.schedule)
        return [f"{name}={value}" for name, value in values.items()]

    def to_plain(self) -> dict[str, Any]:
        """Return the settings as plain data for JSON: a plan as its text, a function as its name."""
        plain = asdict(replace(self, schedule="breadth_first"))
        is_plan = isinstance(self.schedule, StepPlan)
        return plain | {"schedule": str(self.schedule) if is_plan else schedule_name(self.schedule)}

    @staticmethod
    def from_plain(plain: Mapping[str, Any], known: RelayConfig | None = None) -> RelayConfig:
        """Return the settings from the result of `to_plain`.

        A function is that of the `known` settings if they have one of this name. Otherwise the schedule is
        "breadth_first", which trains the same weights to the bit, and a warning names the function.

        Example:
            >>> config = RelayConfig(micro_batches=4, stash="host")
            >>> RelayConfig.from_plain(config.to_plain()) == config
            True
        """
        name = schedule = plain["schedule"]
        if name not in get_args(ScheduleName) and not name.startswith("plan "):
            schedule = None if known is None or schedule_name(known.schedule) != name else known.schedule
        if not callable(schedule) and not isinstance(schedule, str):
            schedule = "breadth_first"
            warnings.warn(
                f"the settings were saved with schedule={name}, a function, and a save holds no code: the schedule is "
                "'breadth_first' now, which trains the same weights to the bit. To go on with the function, set "
                f"relay.config = dataclasses.replace(relay.config, schedule={name})",
                stacklevel=4,  # the caller of Relay.load or Relay.restore
            )
        settings: dict[str, Any] = {**plain, "schedule": schedule}
        return RelayConfig(**settings)

    @property
    def has_own_schedule(self) -> bool:
        """Whether the schedule is a function or a plan of the user."""
        return not isinstance(self.schedule, str)

    @property
    def wire(self) -> Compress | None:
        """The compression of gradients; None for float32."""
        return Compress.of(self.compress)

    def for_layers(self, layers: int) -> RelayConfig:
        """Return the settings of a step over `layers` layers: depth first, all of them stay on the device.

        Example:
            >>> config = RelayConfig(schedule="depth_first").for_layers(24)
            >>> config.resident
            22
        """
        if self.schedule != "depth_first":
            return self
        return replace(self, keep=layers, resident=max(0, layers - self.ahead - 1))

    def with_seed(self, seed: int) -> RelayConfig:
        """Return the settings with this seed if they have none."""
        return replace(self, seed=seed) if self.seed is None else self

    def micro_batch_seed(self, step: int, k: int) -> int:
        """Return the seed of the random stream of micro-batch `k` in step `step` (both from 0).

        A plain loop that calls ``torch.manual_seed`` and Python's ``random.seed`` with it before each micro-batch draws the same
        numbers.

        Raises:
            ValueError: `seed` is None.

        Example:
            >>> config = RelayConfig(micro_batches=2, seed=0)
            >>> [config.micro_batch_seed(step=0, k=k) for k in range(2)]
            [2415664546, 4177210676]
        """
        if self.seed is None:
            raise ValueError(
                "seed=None: a relay takes torch.initial_seed() when it is made; read relay.config, or pass seed="
            )
        return zlib.crc32(f"{self.seed}/{step}/{k}".encode())  # `hash` of a string differs between processes


def checked_config(config: object, has_disk: bool) -> RelayConfig:
    """Return `config` if it is valid for a relay with (`has_disk`) or without a shelf on disk.

    Raises:
        TypeError: not a `RelayConfig`.
        ValueError: ``stash="disk"`` without a shelf.
    """
    if not isinstance(config, RelayConfig):
        raise TypeError(
            f'config={config!r}: give a RelayConfig, or "auto" for a new relay, which then searches for settings'
        )
    if config.stash == "disk" and not has_disk:
        raise ValueError(
            "stash='disk' needs a scratch file in the folder of a shelf, and this relay has no shelf: give "
            "Relay(shelf=FileShelf(folder=..., memory_bytes=...)), or RelayConfig(stash='host')"
        )
    return config


def check_int(name: str, value: object, least: int) -> None:
    """Raise ValueError unless a setting is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:  # bool is a subclass of int
        raise ValueError(f"{name}={value!r}: must be an integer of at least {least}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be True or False")


def _check_choice(name: str, value: object, choices: object, others: str = "") -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, get_args(choices)))}{others}")
