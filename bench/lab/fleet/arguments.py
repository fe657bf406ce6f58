"""The values of a fleet's options, as ``argparse`` reads them, and which fleets cannot be simulated."""

from __future__ import annotations

import argparse
import math

import typer

from diloco import console
from diloco.console import CommandError

LEAST_SECONDS_BETWEEN_FAILURES = 0.01  # of the whole fleet; below it no step is ever made
_UNITS = {"": 1, "k": 1_000, "m": 1_000_000, "b": 1_000_000_000}


def whole_number(text: str) -> int:
    """``5000``, ``150k``, ``2.4M``, ``5e9``, ``5B``."""
    digits = text.strip().rstrip("kKmMbB")
    unit = _UNITS.get(text.strip()[len(digits) :].lower())
    try:
        value = float(digits) * (unit or math.nan)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 1 <= value <= 1e15):
        raise argparse.ArgumentTypeError(f"{text!r} is no number: write 5000, 150k, 2.4M or 5e9")
    return round(value)


def learner_counts(text: str) -> tuple[int, ...]:
    """``8`` or ``2,4,8``."""
    try:
        counts = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        counts = ()
    if not counts or not all(1 <= count <= 4096 for count in counts):
        words = "write numbers from 1 to 4096 with commas between them, such as 2,4,8"
        raise argparse.ArgumentTypeError(f"{text!r}: {words}")
    return counts


def duration(text: str) -> float:
    """``90``, ``90s``, ``10m``, ``2h``, ``1d``, ``1y`` in seconds."""
    try:
        return console.duration(text)
    except typer.BadParameter as error:
        raise argparse.ArgumentTypeError(error.message) from None


def positive(text: str) -> float:
    """A duration that is not 0."""
    seconds = duration(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: it has to be longer than nothing")
    return seconds


def check_fleet(chips: int, learners: tuple[int, ...], slice_chips: float, mtbi: float) -> None:
    """Raises CommandError where there are fewer slices than learners, or failures that come faster than any step."""
    if (wanted := max(learners)) * slice_chips > chips:
        raise CommandError(
            f"--chips {chips}: {wanted} learners need a slice of {slice_chips:g} chips each, {wanted * slice_chips:g}"
            " in all; lower --learners or --slice"
        )
    if mtbi / chips < LEAST_SECONDS_BETWEEN_FAILURES:
        raise CommandError(
            f"--mtbi: of {chips:,} chips one fails every {mtbi / chips:.2g} s; write a time such as 30d or 1y"
        )
