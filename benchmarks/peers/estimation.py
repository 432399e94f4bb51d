"""The learning step in torch operations, for eager execution and for `torch.compile`: the dense Hessian and gradient of
the log-loss in float32, and one Newton step by a dense solve, without damping or bounds.

It is what `accumulate` and `refit` are measured against.
"""

import torch


def newton_step(
    features: torch.Tensor,
    accepted: torch.Tensor,
    admitted: torch.Tensor,
    slope: torch.Tensor,
    intercepts: torch.Tensor,
    ridge: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(slope [1], intercepts [K]) after one step. features float32 [B, K]; accepted, admitted int32 [B]; slope float32
    [1], intercepts float32 [K]."""
    positions = features.shape[1]
    k = torch.arange(positions, device=features.device)
    labelled = (k <= accepted[:, None]) & (k < admitted[:, None])
    p = torch.sigmoid(slope * features + intercepts)
    weight = torch.where(labelled, p * (1 - p), 0.0)
    residual = torch.where(labelled, (k < accepted[:, None]).float() - p, 0.0)
    shared = (weight * features).sum(0)
    corner = (weight * features**2).sum()[None, None]
    hessian = torch.cat([torch.cat([corner, shared[None]], 1), torch.cat([shared[:, None], weight.sum(0).diag()], 1)])
    gradient = torch.cat([(residual * features).sum()[None], residual.sum(0)])
    step = torch.linalg.solve(hessian + ridge * torch.eye(positions + 1, device=features.device), gradient)
    return slope + step[:1], intercepts + step[1:]
