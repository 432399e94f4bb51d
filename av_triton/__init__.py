"""Adaptive verification for speculative decoding, without a confidence head."""

from av_triton.cost import CostTable
from av_triton.estimator import AcceptanceEstimator, Coefficients, Drafts
from av_triton.ops.accumulate import accumulate
from av_triton.ops.budget import choose_budget
from av_triton.ops.entropy import entropy_from_partial, entropy_partial, logit_max_and_entropy, merge_entropy
from av_triton.ops.logit_max import logit_from_partial, logit_max, logit_max_partial, merge_logit_max
from av_triton.ops.refit import refit
from av_triton.ops.sample import sample_and_score
from av_triton.ops.score import acceptance_score, score_logits
from av_triton.ops.segmented_topk import segmented_topk
from av_triton.ops.survival import survival
from av_triton.planner import Plan, VerifyPlanner
from av_triton.settings import GREEDY, SAMPLED, Settings
from av_triton.snapshot import Snapshot, SnapshotError
from av_triton.verifier import AdaptiveVerifier, Status

__all__ = [
    "GREEDY",
    "SAMPLED",
    "AcceptanceEstimator",
    "AdaptiveVerifier",
    "Coefficients",
    "CostTable",
    "Drafts",
    "Plan",
    "Settings",
    "Snapshot",
    "SnapshotError",
    "Status",
    "VerifyPlanner",
    "acceptance_score",
    "accumulate",
    "choose_budget",
    "entropy_from_partial",
    "entropy_partial",
    "logit_from_partial",
    "logit_max",
    "logit_max_and_entropy",
    "logit_max_partial",
    "merge_entropy",
    "merge_logit_max",
    "refit",
    "sample_and_score",
    "score_logits",
    "segmented_topk",
    "survival",
]
