"""The floor of the score on a GPU: the bytes it has to read, the instructions it has to issue."""

import msgspec

from benchmarks.kernels.static import VOCAB

SHAPES = ((64, 7), (256, 7), (1024, 7), (64, 16), (256, 16), (1024, 16))


class GPU(msgspec.Struct, frozen=True):
    """Vendor figures at boost clock: terabytes per second; lanes that issue one instruction per clock; GHz."""

    name: str
    terabytes: float
    lanes: int
    gigahertz: float


GPUS = (
    GPU("H200", 4.8, 132 * 128, 1.98),
    GPU("H100", 3.35, 132 * 128, 1.98),
    GPU("B200", 8.0, 148 * 128, 1.965),
    GPU("MI300X", 5.3, 304 * 64, 2.1),
)


def score_bytes(rows: int, positions: int, vocab: int = VOCAB, itemsize: int = 2) -> int:
    """Read: the logits, once, and a slot. Written: feature and score by slot, score by row, all float32."""
    return rows * positions * (vocab * itemsize + 3 * 4) + rows * 4


def memory_us(gpu: GPU, count: int) -> float:
    return count / gpu.terabytes / 1e6


def issue_us(gpu: GPU, logits: int, per_logit: float) -> float:
    return logits * per_logit / (gpu.lanes * gpu.gigahertz) / 1e3
