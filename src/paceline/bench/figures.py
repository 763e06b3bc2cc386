"""Numbers of a report as text."""

from __future__ import annotations

from paceline.bench.intervals import Interval


def figure(
    value: Interval | float | None, digits: int, *, scale: float = 1.0, is_signed: bool = False
) -> str:
    """A number, with its interval when it has one; empty for none.

    Args:
        value: to be shown.
        digits: behind the decimal point.
        scale: factor, such as 100 for percent.
        is_signed: show the sign of positive numbers too.
    """
    if value is None:
        return ""
    form = f"{'+' if is_signed else ''}.{digits}f"
    if isinstance(value, Interval):
        low, high = (format(scale * bound, form) for bound in (value.low, value.high))
        return f"{format(scale * value.value, form)} [{low}, {high}]"
    return format(scale * value, form)
