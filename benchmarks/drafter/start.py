"""Analytic start of the drafter; from a random one, hours of training are spent before the first draft is accepted.

Ridge regression predicts the target's hidden state at the anchor from what a block knows: the features of the position
before and the anchor's embedding. The map is built into `fc` and layer 0: five heads of the mask rows look at the
latest context rows, four at the anchor row; their values and outputs are low-rank factors of the map's two parts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import EPS, HEAD_DIM, HEADS, HIDDEN, MASK_TOKEN, Drafter
from torch import Tensor

CONTEXT_HEADS = 5
RIDGE = 0.03


def unit_rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, EPS)


def second_moment(x: Tensor, jitter: float) -> Tensor:
    moment = x.T @ x / len(x)
    return moment + jitter * moment.diagonal().mean() * torch.eye(x.shape[1])


def factorise(matrix: Tensor, inputs: Tensor, metric: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors (value, output) of `output @ value ~ matrix`, the best of their rank for `inputs` when errors are weighed
    by `metric` (a Cholesky factor), scaled so that the values have unit rms."""
    eigenvalues, basis = torch.linalg.eigh(second_moment(inputs, 1e-4))
    root, inverse_root = basis * eigenvalues.sqrt() @ basis.T, basis / eigenvalues.sqrt() @ basis.T
    u, s, vh = torch.linalg.svd(metric.T @ matrix @ root)
    value = s[:rank, None].sqrt() * vh[:rank] @ inverse_root
    output = torch.linalg.solve(metric.T, u[:, :rank] * s[:rank].sqrt())
    gain = (inputs[:2000] @ value.T).pow(2).mean().sqrt()
    return value / gain, output * gain


@torch.no_grad()
def ridge_start(
    drafter: Drafter,
    features: Tensor,
    anchors: Tensor,
    hidden: Tensor,
    embedding: Tensor,
    final_norm: Tensor,
    vocabulary: Tensor,
) -> float:
    """Initialise `drafter` from samples: target `features` before an anchor, the `anchors`' embeddings, the normed
    `hidden` states at them. `vocabulary` lists the tokens whose logits matter. Returns the explained variance."""
    for name, weight in drafter.named_parameters():
        if weight.ndim == 2:
            weight.normal_(std=weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.5)
    drafter.norm.weight.copy_(final_norm)

    context, anchor, goal = features * drafter.feature_scale, unit_rms(anchors), hidden / final_norm
    x = torch.cat([context, anchor, torch.ones(len(goal), 1)], 1)
    gram = (x.T @ x).double() / len(x) + RIDGE * torch.eye(x.shape[1], dtype=torch.double)
    solution = torch.linalg.solve(gram, (x.T @ goal).double() / len(x)).float()
    explained = 1 - (x @ solution - goal).pow(2).mean() / (goal - goal.mean(0)).pow(2).mean()
    from_context, from_anchor, bias = solution.split([context.shape[1], HIDDEN, 1])

    raw = context @ from_context
    scale = raw.pow(2).mean(-1).sqrt().mean()
    drafter.fc.weight.copy_(from_context.T / scale)
    context, mask_embedding = unit_rms(raw), embedding[MASK_TOKEN]
    mask = unit_rms(mask_embedding)

    # Linear functionals that tell the three kinds of rows apart: heads use them to look at one kind only.
    kinds = torch.cat([context[:8000], anchor[:8000], mask.expand(4000, -1)])
    sizes = [min(8000, len(goal))] * 2 + [4000]
    inverse = torch.linalg.inv(kinds.T @ kinds / len(kinds) + 0.01 * torch.eye(HIDDEN)) @ kinds.T / len(kinds)
    is_context, is_anchor = (
        inverse @ torch.cat([torch.full((size,), sign) for size, sign in zip(sizes, signs, strict=True)])
        for signs in ((1.0, -1.0, -1.0), (-1.0, 1.0, -1.0))
    )

    metric = torch.linalg.cholesky(second_moment(embedding[vocabulary] * final_norm, 1e-3))
    carry = scale * torch.eye(HIDDEN) + torch.outer(bias[0] - mask_embedding, is_context)
    split = CONTEXT_HEADS * HEAD_DIM
    context_value, context_output = factorise(carry, context, metric, split)
    anchor_value, anchor_output = factorise(from_anchor.T, anchor, metric, HIDDEN - split)
    attention = drafter.layers[0].self_attn
    attention.v_proj.weight.copy_(torch.cat([context_value, anchor_value]))
    attention.o_proj.weight.copy_(torch.cat([context_output, anchor_output], 1))

    projections = attention.q_proj, attention.k_proj
    queries, keys = (projection.weight.mul_(0.3).view(HEADS, HEAD_DIM, HIDDEN) for projection in projections)
    for head in range(HEADS):
        pattern = torch.zeros(HEAD_DIM)
        if head < CONTEXT_HEADS:  # middle rotary frequencies: the score falls with the distance
            pattern[slice(2, 12) if head < 3 else slice(5, 15)] = 1
        else:  # low frequencies: the distance does not matter
            pattern[20:32] = 1
        pattern *= HEAD_DIM**0.5 / pattern.norm()
        queries[head] += torch.outer(pattern, mask / mask.pow(2).sum())
        keys[head] += torch.outer(pattern, is_context if head < CONTEXT_HEADS else is_anchor)
    attention.q_norm.weight.fill_(1.5)
    for layer in drafter.layers:
        layer.mlp.down_proj.weight.mul_(0.02)
    for layer in drafter.layers[1:]:
        layer.self_attn.o_proj.weight.mul_(0.03)
    return explained.item()
