"""Kubernetes quantities: ``10Gi``, ``500M``, ``1e9``."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(r"^([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?$")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_LIMIT = 2**63


def parse_quantity(text: str) -> int:
    """The quantity as a whole number, rounded up as Kubernetes does (bytes for a storage size).

    Raises ValueError, saying what was expected, for anything that Kubernetes would refuse.
    """
    match = _QUANTITY.match(text) if len(text) <= 64 else None
    if match is None:
        raise ValueError("must be a quantity such as 10Gi, 500M or 1000000000")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY:
        value = number * 2 ** _BINARY[suffix]
    elif suffix in _DECIMAL:
        value = number.scaleb(_DECIMAL[suffix])
    else:
        value = number.scaleb(int(suffix[1:]))
    whole = int(value.to_integral_value(rounding="ROUND_CEILING"))
    if abs(whole) >= _LIMIT:
        raise ValueError("is out of range: a quantity is below 2^63 (8Ei)")
    return whole


def bytes_of(quantity: str) -> int:
    """The same; 0 where it is no quantity, which the API server says."""
    try:
        return parse_quantity(quantity)
    except ValueError:
        return 0
