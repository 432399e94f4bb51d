"""The budget of the published formula on the host, in numpy, from confidences that were copied back."""

import numpy as np
import numpy.typing as npt


def budget(confidence: npt.NDArray[np.float32], cost: npt.NDArray[np.float64]) -> int:
    """argmax over n of (requests + sum of the n best survivals) / cost[n].

    confidence float32 [B, K]; cost float64 [N + 1], N >= B * K, of a step with n drafts.
    """
    survival = np.cumprod(confidence, axis=1, dtype=np.float64)
    best_first = np.sort(survival, axis=None)[::-1]
    accepted = len(confidence) + np.concatenate(([0.0], np.cumsum(best_first)))
    return int(np.argmax(accepted / cost[: len(accepted)]))
