"""Argument checks that the ops share. They read shapes and dtypes only, never the device."""

from collections.abc import Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int32, torch.int64)


def check_logits(logits: torch.Tensor, max_vocab: int) -> None:
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"logits are {type(logits).__name__}: give a tensor, float32, bfloat16 or float16")
    if logits.dtype not in FLOATS:
        raise ValueError(f"logits have dtype {logits.dtype}: give float32, bfloat16 or float16")
    if logits.dim() < 1 or not 1 <= logits.shape[-1] <= max_vocab:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: the last dimension must be 1 to {max_vocab} tokens")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(f"logits have stride {logits.stride(-1)} along the vocabulary: make that dimension contiguous")


def temperature_argument(
    temperature: torch.Tensor | float | None, shape: Sequence[int], device: torch.device
) -> tuple[torch.Tensor | None, float]:
    """(tensor or None, number): the pair that the kernels take; 0 stands for "scaled by 1"."""
    if temperature is None:
        return None, 0.0
    if isinstance(temperature, torch.Tensor) and temperature.dim() > 0:
        if tuple(temperature.shape) != tuple(shape):
            raise ValueError(f"temperature has shape {tuple(temperature.shape)}: give one value a row, {tuple(shape)}")
        if temperature.device != device or temperature.dtype != torch.float32:
            raise ValueError(
                f"temperature is {temperature.dtype} on {temperature.device}: give float32 on {device}, as the logits"
            )
        return temperature.contiguous(), 0.0
    if isinstance(temperature, torch.Tensor) and temperature.device.type != "cpu":
        raise ValueError(
            f"temperature is one number on {temperature.device}, and reading it would wait for the device: "
            "give a Python number, or float32, one per row"
        )
    try:
        value = float(temperature)
    except (TypeError, ValueError) as error:
        raise ValueError(f"temperature is {temperature!r}: give None, a number, or float32, one per row") from error
    if not 0.0 <= value < float("inf"):
        raise ValueError(f"temperature = {value}: give a finite number, 0 (greedy) or more")
    return None, value


def check_per_draft(
    name: str, tensor: torch.Tensor | None, without: str, shape: Sequence[int], device: torch.device
) -> None:
    """None, which means `without`, or int64 of `shape`."""
    if tensor is None:
        return
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int64 or tensor.device != device:
        what = f"{tensor.dtype} on {tensor.device}" if isinstance(tensor, torch.Tensor) else repr(tensor)
        raise ValueError(f"{name} are {what}: give int64 on {device}, one per draft, or None for {without}")
    if tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} have shape {tuple(tensor.shape)}: give one per draft, {tuple(shape)}")


def check_seeds(seeds: torch.Tensor | None, shape: Sequence[int], device: torch.device) -> None:
    check_per_draft("seeds", seeds, "the argmax", shape, device)


def check_acceptance(acceptance: torch.Tensor, rows: int, positions: int, device: torch.device) -> None:
    """float32 [rows, k], k <= positions, on `device`."""
    if not isinstance(acceptance, torch.Tensor) or acceptance.dtype != torch.float32 or acceptance.device != device:
        what = (
            f"{acceptance.dtype} on {acceptance.device}" if isinstance(acceptance, torch.Tensor) else repr(acceptance)
        )
        raise ValueError(f"acceptance is {what}: give float32 on {device}, one probability per draft, or None")
    if acceptance.dim() != 2 or acceptance.shape[0] != rows or acceptance.shape[1] > positions:
        raise ValueError(
            f"acceptance has shape {tuple(acceptance.shape)}: give one row per slot and one column per draft position, "
            f"({rows}, at most {positions})"
        )


def check_vector(
    name: str, tensor: torch.Tensor, length: int, dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """One-dimensional, contiguous, of `length`, on `device`, with one of `dtypes`."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is {type(tensor).__name__}: give a tensor of shape ({length},) on {device}")
    if tensor.dim() != 1 or tensor.shape[0] != length:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: give ({length},)")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}: give {' or '.join(str(d) for d in dtypes)}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: move it to {device}, where the verifier lives")
    if length > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} has stride {tensor.stride(0)}: make it contiguous")
