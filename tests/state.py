"""What an object of the library holds on the device, for comparisons."""

from collections.abc import Iterable

import torch


def tensors(state: Iterable[object], name: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a (nested) named tuple by their names."""
    found = {}
    for field, value in zip(state._fields, state, strict=True):
        if isinstance(value, torch.Tensor):
            found[name + field] = value
        elif value is not None:
            found.update(tensors(value, f"{name}{field}."))
    return found


def copies(state: Iterable[object]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors(state).items()}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that do not have the same bits; a NaN equals a NaN."""
    assert one.keys() == other.keys()
    return [name for name in one if not _same(one[name], other[name])]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) if not a.is_floating_point() else torch.equal(*(x.nan_to_num(-7.25) for x in (a, b)))
