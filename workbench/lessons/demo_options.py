"""Command line options of the demo, and their conversion to settings."""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.lessons.demo_values import FULL, QUICK, Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m workbench demo`."""
    whole = _min_value_parser(int, 1)
    parser.add_argument(
        "--quick", action="store_true", help="a small model for a few seconds, without a target to reach"
    )
    parser.add_argument("--steps", type=whole, help=f"steps to train (default: {FULL.steps})")
    parser.add_argument("--layers", type=whole, help=f"layers of the model (default: {FULL.layers})")
    parser.add_argument("--width", type=whole, help=f"width, a multiple of {FULL.heads} (default: {FULL.width})")
    parser.add_argument(
        "--budget",
        type=_min_value_parser(float, 1e-3),
        help=f"device memory in MB (default: {FULL.budget_bytes / 1e6:g})",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out", "demo"), help="folder for results (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=_min_value_parser(int, 0), help=f"start of every random stream (default: {FULL.seed})"
    )
    parser.add_argument(
        "--device",
        default="emulated",
        help="'emulated' has the budget; 'cpu' has none; or what Relay(device=...) takes (default: %(default)s)",
    )


def settings_from_args(args: argparse.Namespace) -> Settings:
    """Return the settings given by the options.

    Raises:
        ValueError: the number of heads does not divide the width.
    """
    given = {name: getattr(args, name) for name in ("steps", "layers", "width", "seed")}
    given["budget_bytes"] = None if args.budget is None else round(args.budget * 1e6)
    start = QUICK if args.quick else FULL
    settings = replace(start, **{name: value for name, value in given.items() if value is not None})
    if settings.width % settings.heads:
        near = max(1, round(settings.width / settings.heads)) * settings.heads
        raise ValueError(
            f"--width {settings.width}: the number of heads, {settings.heads}, must divide it; try --width {near}"
        )
    return replace(settings, compared=min(settings.compared, settings.steps))


def _min_value_parser(kind: type[int] | type[float], minimum: float) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        value = kind(text)
        if not value >= minimum or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {minimum:g}")
        return value

    return number
