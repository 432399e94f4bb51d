"""One fit for many data-parallel replicas: their Hessian and gradient sums are added exactly, then each refits.

    sums = all_reduce(sums of every replica)     int64 [strata, 6, P], Q30: integers, so in any order the same bits
    coefficients = refit(sums)                   the same input on every replica, so the same bits

In a captured step `observe` adds to the sums and, when a cycle is full, refits in the same launch; a collective cannot
go in between. So the cycle of a replica never fills (its counter is put far below zero), and the refit is a call of its
own, between two steps, at the interval that every replica counts on the host.
"""

import torch.distributed as dist

from av_triton.estimator import AcceptanceEstimator
from av_triton.ops.accumulate import CYCLE, REFITS, close_unsettled
from av_triton.ops.refit import count_labels, refit
from av_triton.verifier import AdaptiveVerifier

_NEVER_FULL = -(1 << 62)


class ReplicaRefit:
    """Replaces the refit of one replica's verifier by a common one. Every replica of `group` constructs it, and calls
    `step` equally often:

        replicas = ReplicaRefit(verifier)       # takes over coefficients and labels of the group's first replica
        while serving:
            ...                                 # score, plan, verify, observe: replayed from a graph or not
            replicas.step()                     # also in a step without requests

    Per refit interval one message of strata * 6 * P int64, P = K rounded up to a power of two: 768 bytes for 2 strata
    and 7 positions. To load coefficients later, load them on every replica and construct it anew.

    Args:
        verifier: `Settings.replicas` must be at least the size of the group: it bounds the sums.
        group: a torch.distributed group whose backend reduces int64 tensors on the verifier's device (gloo, nccl);
            None: the default group.

    Raises ValueError where the replicas differ in what they learn from, or are more than `Settings.replicas`.
    """

    def __init__(
        self, verifier: AdaptiveVerifier | AcceptanceEstimator, group: dist.ProcessGroup | None = None
    ) -> None:
        estimator = verifier.estimator if isinstance(verifier, AdaptiveVerifier) else verifier
        self._state, self._settings = estimator.state, estimator.settings
        self._positions, self._group, self._steps = estimator.num_draft_positions, group, 0
        c, size = self._settings, dist.get_world_size(group)
        mine = (
            *(self._positions, c.strata, c.refit_interval, c.ridge, c.damping, c.memory),
            *(c.max_slope_step, c.max_intercept_step),
        )
        if size < 1:
            raise ValueError("this process is not in the group: construct ReplicaRefit on the members of a group alone")
        everyone: list[tuple[object, int]] = [(mine, c.replicas)] * size
        # Before anything is refused: a replica that raises alone leaves the others waiting.
        dist.all_gather_object(everyone, (mine, c.replicas), group=group)
        if size > (least := min(replicas for _, replicas in everyone)):
            raise ValueError(
                f"{size} replicas, but Settings.replicas = {least}: set it to {size} on each, so that the bound of the "
                "fixed-point sums covers them all"
            )
        if other := next((theirs for theirs, _ in everyone if theirs != mine), None):
            raise ValueError(
                f"the replicas differ in (K, strata, refit_interval, ridge, damping, memory, max_slope_step, "
                f"max_intercept_step): {mine} here, {other} elsewhere; give every replica the same settings"
            )
        first = dist.get_global_rank(group, 0) if group is not None else 0
        for learned in (self._state.slopes, self._state.intercepts, self._state.labels):
            dist.broadcast(learned, src=first, group=group)
        close_unsettled(self._state.gates, self._state.labels)
        self._state.sums.zero_()
        self._state.clock[CYCLE] = _NEVER_FULL

    def step(self) -> bool:
        """Count one step; at every `refit_interval`-th, add the sums of all replicas and refit. True: it did.

        Call it outside of a captured graph, on the stream of the verifier. The collective is the only wait.
        """
        self._steps += 1
        c = self._settings
        if self._steps % c.refit_interval:
            return False
        s, k = self._state, slice(0, self._positions)
        dist.all_reduce(s.sums, group=self._group)
        sums, labels = s.sums[:, :, k], s.labels[:, k]
        slopes, intercepts = refit(
            *(sums, s.slopes, s.intercepts[:, k], c.ridge, c.damping, c.max_slope_step, c.max_intercept_step),
            before=labels,
            memory=c.memory,
        )
        count_labels(labels, sums)
        s.slopes.copy_(slopes)
        s.intercepts[:, k] = intercepts
        s.sums.zero_()
        s.clock[CYCLE] = _NEVER_FULL
        s.clock[REFITS] += 1
        return True
