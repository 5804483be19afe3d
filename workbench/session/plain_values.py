"""Encoding of a session's values as JSON and a dictionary of tensors; nothing is pickled.

It adds arrays of NumPy and the records below to what `l2l_core.model.encode` takes. A field that a record gains is saved
without a change here, and a save without it gets the field's default.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy
import torch

from l2l_core import Compress
from l2l_core.model import Tensors, decode, encode, tensor_copier
from workbench.session.probe_verdict import LossChange, ProbeLosses
from workbench.session.snapshot_values import Change, HeldOutRow, StepRow

RECORDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (StepRow, Change, HeldOutRow, LossChange, ProbeLosses, Compress)
}


def pack(value: Any, at: str, tensors: Tensors) -> Any:
    """Return a value for JSON, and add its tensors and arrays to `tensors` under names that begin with `at`.

    Raises:
        ValueError: it holds something else than tensors, arrays, records and plain data.
    """
    kind = type(value)
    if RECORDS.get(kind.__name__) is kind:
        packed = {f.name: pack(getattr(value, f.name), f"{at}/{f.name}", tensors) for f in fields(value)}
        return {"record": kind.__name__, "fields": packed}
    if kind in (list, tuple):
        if {*map(type, value)} <= {int}:  # long ones are numbers
            return {kind.__name__: list(value)}
        return {kind.__name__: [pack(one, f"{at}/{i}", tensors) for i, one in enumerate(value)]}
    if kind in (dict, OrderedDict):
        return {kind.__name__: [[encode(k, at, tensors), pack(v, f"{at}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, numpy.ndarray | numpy.generic) and value.dtype.kind in "biuf":
        return {"array": encode(torch.from_numpy(numpy.array(value)), at, tensors), "scalar": kind is not numpy.ndarray}
    if isinstance(value, dict):  # of another class, which would be lost
        raise ValueError(f"{at} is a {kind.__name__}, which cannot be saved: use a dict")
    return encode(value, at, tensors)


def unpack(packed: Any, tensors: Tensors) -> Any:
    """Return a value from the result of `pack`, with copies of its tensors.

    Raises:
        TypeError: a record of another version, with other fields.
    """
    copier = tensor_copier(tensors)

    def read(one: Any) -> Any:
        if not isinstance(one, dict):
            return one
        if "record" in one:
            return RECORDS[one["record"]](**{name: read(v) for name, v in one["fields"].items()})
        if "array" in one:
            array = decode(one["array"], copier).numpy()
            return array[()] if one["scalar"] else array
        kind, content = next(iter(one.items()))
        if kind in ("list", "tuple"):
            items = map(read, content)
            return list(items) if kind == "list" else tuple(items)
        if kind in ("dict", "OrderedDict"):
            pairs = [(decode(k, copier), read(v)) for k, v in content]
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        return decode(one, copier)

    return read(packed)
