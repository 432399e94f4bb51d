"""The step context and the cut of acceptance, without an engine."""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from av_triton import CostTable, Settings, entropy_partial, logit_max_partial
from av_triton.ops.head import MAX_HIDDEN
from av_triton_sglang import acceptance, graphs, measure, ragged, step_times
from av_triton_sglang.flag import Config, Launch
from av_triton_sglang.ranks import Ranks
from av_triton_sglang.step import LAG, StepContext, changes_target, head_width

K, SLOTS, VOCAB = 4, 8, 16
CACHE_KEY = (
    "model_path", "revision", "dtype", "quantization", "kv_cache_dtype", "attention_backend",
    "prefill_attention_backend", "decode_attention_backend", "speculative_algorithm", "speculative_draft_model_path",
    "speculative_draft_model_revision", "speculative_num_draft_tokens", "tp_size", "max_running_requests",
)  # fmt: skip


@pytest.fixture(autouse=True)
def installed_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "version", lambda package: "0")


def arguments(**changes: Any) -> SimpleNamespace:
    fields = dict.fromkeys(CACHE_KEY) | {"speculative_dspark_sps_table_path": None, "enable_metrics": False}
    return SimpleNamespace(**fields | changes)


def context(
    tmp_path: Path,
    autoregressive: bool = False,
    hidden_size: int | None = None,
    ranks: Ranks | None = None,
    **config: Any,
) -> StepContext:
    CostTable(draft=[(1, 1.0)], verify=[(1, 2.0), (40, 80.0)]).save(tmp_path / "cost.json")
    launch = Launch(config=Config(**{"cost_table": str(tmp_path / "cost.json")} | config), algorithm="DSPARK")
    return StepContext(
        launch,
        arguments(),
        num_draft_positions=K,
        num_slots=SLOTS,
        max_rows=SLOTS,
        device="cpu",
        autoregressive=autoregressive,
        hidden_size=hidden_size,
        ranks=ranks,
    )


def request(**changes: Any) -> SimpleNamespace:
    sampling = {
        "top_k": -1, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
        "logit_bias": None, "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None,
        "custom_params": None, "watermark": None,
    }  # fmt: skip
    own = {key: changes.pop(key) for key in ("grammar", "custom_logit_processor") if key in changes}
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**sampling | changes),
        **{"grammar": None, "custom_logit_processor": None} | own,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"frequency_penalty": 0.1}, {"presence_penalty": -0.1}, {"repetition_penalty": 1.1}, {"min_new_tokens": 3},
        {"logit_bias": {"1": 2.0}}, {"json_schema": "{}"}, {"regex": "a"}, {"ebnf": "a"}, {"structural_tag": "a"},
        {"custom_params": {"a": 1}}, {"watermark": object()}, {"grammar": object()}, {"custom_logit_processor": "a"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_a_request_with_another_target_is_recognised(change: dict[str, Any]) -> None:
    assert not changes_target(request())
    assert changes_target(request(**change))


def step(context: StepContext, slots: list[int], accepted: list[int]) -> torch.Tensor:
    context.begin(torch.tensor(slots))
    context.score(torch.randn(len(slots), K, VOCAB) * 3)
    admitted = context.plan().admitted.clone()
    context.observe(torch.minimum(torch.tensor(accepted), admitted))
    context.end()
    return admitted


def test_rows_with_another_target_do_not_teach(tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = Settings(policy="fixed", fixed_budget=2 * K)
    each = context(tmp_path, settings=settings)
    each.reset(torch.tensor([2, 5]), [request(), request(logit_bias={"1": 1.0})])
    step(each, [2, 5], [4, 4])
    taught = each.verifier.counters()["labelled"].sum()
    each.reset(torch.tensor([5]), [request()])
    step(each, [5], [4])
    assert each.verifier.counters()["labelled"].sum() > taught > 0
    only = context(tmp_path, settings=settings)
    only.reset(torch.tensor([5]), [request(logit_bias={"1": 1.0})])
    step(only, [5], [4])
    assert only.verifier.counters()["admitted"].sum() > 0
    assert only.verifier.counters()["labelled"].sum() == 0


def test_a_step_learns_from_what_the_rejection_sampler_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    settings = Settings(policy="fixed", fixed_budget=2 * K, offset_prior=2.0, refit_interval=1000)
    each, slots = context(tmp_path, settings=settings), torch.tensor([2, 5])
    monkeypatch.setattr("av_triton_sglang.step._current", each)
    each.reset(slots, [request(), request()])
    state = each.verifier.estimator.state
    p, q = torch.rand(2, K + 1, VOCAB).softmax(-1), torch.rand(2, K, VOCAB).softmax(-1)
    candidates = torch.randint(0, VOCAB, (2, K + 1))
    drawn = candidates[:, 1:, None]
    q[0, 1, drawn[0, 1]] = torch.nan
    q[1, 2, drawn[1, 2]] = 0.0
    alpha = (p[:, :K].gather(2, drawn) / q.gather(2, drawn))[..., 0].clamp(max=1)
    alpha[0, 1] = alpha[1, 2] = 0.0  # the sampler rejects where q is no probability
    reach = torch.cat([torch.ones(2, 1), alpha[:, :-1]], 1).cumprod(1)
    each.begin(slots)
    each.score(torch.randn(2, K, VOCAB) * 3)
    each.plan()
    acceptance.note(candidates=candidates.int(), target_probs=p, draft_probs=q, deterministic=True)
    each.observe(torch.tensor([0, 0]))
    torch.testing.assert_close((state.sums[0, 5, :K] / 2**30).float(), reach.sum(0))
    assert bool((state.offsets[slots] != 0).all())
    state.sums.zero_()
    step(each, [2, 5], [0, 0])
    assert (state.sums[0, 5, :K] / 2**30).tolist() == [2, 0, 0, 0], "verdicts again: nothing was noted in this step"


def test_strata_follow_the_requests_temperature(tmp_path: Path) -> None:
    each = context(tmp_path)
    each.reset(torch.tensor([1, 2]), [request(top_k=1), request()])
    assert each.verifier.estimator.state.strata.tolist()[:3] == [0, 1, 0]
    one = context(tmp_path, settings=Settings(strata=("all",), initial_slopes=(0.7,)))
    one.reset(torch.tensor([1]), [request(top_k=1)])
    assert one.verifier.estimator.state.strata.tolist()[1] == 0


def test_slots_beyond_the_batch_are_padding(tmp_path: Path) -> None:
    each = context(tmp_path)
    each.begin(torch.tensor([3, 4, 5]))
    address = each.slots(SLOTS).data_ptr()
    each.begin(torch.tensor([6]))
    assert each.slots(SLOTS).tolist() == [6] + [-1] * (SLOTS - 1)
    assert each.slots(SLOTS).data_ptr() == address
    assert each.slots(2, first=1).tolist() == [-1, -1]


def test_a_position_scored_after_the_verdicts_waits_for_the_next_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    each = context(tmp_path)
    slots = torch.tensor([3])
    each.reset(slots, [request()])
    each.score(torch.randn(1, VOCAB), position=0, slots=slots)
    first = float(each.verifier.estimator.state.scores[3, 0])
    each.begin(slots)
    for position in range(1, K):
        each.score(torch.randn(1, VOCAB), position=position)
    each.plan()
    each.observe(torch.tensor([0]))
    each.score(torch.randn(1, VOCAB), position=0)
    each.end()
    assert 0 < first < 1
    assert 0 < float(each.verifier.estimator.state.scores[3, 0]) < 1
    assert float(each.verifier.estimator.state.scores[3, 0]) != first
    assert each.verifier.counters()["labelled"][0] == 1


def test_costs_are_put_in_force_after_the_timed_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"cost_table": None, "cost_cache": str(tmp_path / "cache")}
    each, contexts = context(tmp_path, **config), []
    verify = CostTable(draft=[(1, 1e-6)], verify=[(1, 2.0), (40, 80.0)])
    monkeypatch.setattr(measure, "measure_verify", lambda forward, *_: contexts.append(forward.context) or verify)
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(SLOTS, 2048)))
    monkeypatch.setattr(graphs, "captured_sizes", lambda runner: None)
    assert each.verifier.status().reason.startswith("no cost table")
    each.measure_costs(runner, hidden_states=True)
    each.reset(torch.tensor([0, 1]), [request(), request()])
    for _ in range(measure.DRAFT_STEPS):
        assert step(each, [0, 1], [0, 0]).tolist() == [K, K]
    assert each.cost_source == "none"
    step(each, [0, 1], [0, 0])
    [kept] = (tmp_path / "cache").iterdir()
    assert each.cost_source == f"measured at start-up, kept in {kept}"
    assert CostTable.load(kept).verify == verify.verify
    again, longer, longest = (context(tmp_path, **config, cost_context=n) for n in (512, 1024, 4096))
    again.measure_costs(runner, hidden_states=True)
    assert again.cost_source == f"{kept} (measured before)"
    for other in (longer, longest):
        other.measure_costs(runner, hidden_states=True)
    # No longer than the rows of the request pool, where the drafts go too.
    assert contexts == [512, 1024, 2048 - K - 1]


def test_what_a_request_costs_is_no_price_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of 5 ms, 1 ms for each token and 3 ms for each request, whose context is read."""
    now = 0.0

    def forward(tokens: int, requests: int | None = None) -> None:
        nonlocal now
        now += (5 + tokens + 3 * (requests or measure.fewest(tokens, K + 1))) / 1e3

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    table = measure.measure_verify(forward, max_requests=8, width=K + 1, progress=False)
    assert table.draft == [(1, pytest.approx(3.0)), (8, pytest.approx(24.0))]
    assert table.verify == [(tokens, pytest.approx(5.0 + tokens)) for tokens, _ in table.verify]
    assert [tokens for tokens, _ in table.verify][-1] == 8 * (K + 1)
    alone = measure.measure_verify(forward, max_requests=1, width=K + 1, progress=False)
    assert alone.verify[0] == (1, pytest.approx(5.0 + 1 + 3))


@pytest.mark.parametrize("extra", [1.0, 4.0, 100.0])
def test_requests_that_look_dear_leave_the_tokens_their_cost(monkeypatch: pytest.MonkeyPatch, extra: float) -> None:
    """Only the tokens cost something, 5 ms and 20 us each; the one forward with all requests was slow."""
    now = 0.0

    def forward(tokens: int, requests: int | None = None) -> None:
        nonlocal now
        now += (5 + 0.02 * tokens + (extra if requests == 8 else 0)) / 1e3

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    table = measure.measure_verify(forward, max_requests=8, width=K + 1, progress=False)
    assert [ms for _, ms in table.verify] == pytest.approx([4.9] * len(table.verify), abs=0.1)
    most = 8 * (K + 1)
    whole = table.dense(8, most)
    assert float(whole.verify[most] + whole.draft[8]) == pytest.approx(5 + 0.02 * most)


def test_a_slow_size_does_not_hide_what_larger_ones_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def forward(tokens: int, requests: int | None = None) -> None:
        nonlocal now
        now += (5 + tokens + (30 if tokens == 6 else 0)) / 1e3

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    table = measure.measure_verify(forward, max_requests=8, width=K + 1, progress=False)
    curve = table.dense(8, 8 * (K + 1)).verify
    assert [float(curve[n]) for n in (4, 8, 16, 24)] == pytest.approx([9.0, 13.0, 21.0, 29.0])
    assert float(curve[6]) == pytest.approx(13.0)


def test_a_drafter_that_pays_per_position_drafts_as_deep_as_planned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    each = context(tmp_path, autoregressive=True, settings=Settings(exploration=0.0))
    slots = torch.tensor([0, 1])
    each.reset(slots, [request(), request()])
    depths = []
    for _ in range(8):
        each.begin(slots)
        depths.append(each.start_drafting())
        for position in range(depths[-1]):
            each.score(torch.zeros(2, VOCAB), position)  # no token is likely: the logs of 16 tokens are alike
        plan = each.plan()
        each.follow(plan)
        assert plan.admitted.max() <= depths[-1]
        each.observe(torch.zeros(2, dtype=torch.int64))
        each.end()
    assert depths[0] == K
    assert depths[-1] == 1
    assert each.verifier.counters()["drafted"].tolist() == [2 * sum(d > k for d in depths) for k in range(K)]


@pytest.mark.parametrize("hidden_size, learns", [(None, False), (8, True), (MAX_HIDDEN, True), (MAX_HIDDEN + 1, False)])
def test_a_hidden_state_that_is_too_wide_for_a_head_is_left_aside(
    tmp_path: Path, hidden_size: int | None, learns: bool
) -> None:
    each = context(tmp_path, hidden_size=hidden_size)
    assert (each.verifier.estimator.state.head is not None) == learns
    each.begin(torch.tensor([3]))
    each.score(torch.randn(1, K, VOCAB), hidden=torch.randn(1, K, hidden_size or 5))
    each.score(torch.randn(1, VOCAB), position=0, hidden=torch.randn(2 * (hidden_size or 5), 1).T[:, ::2])


@pytest.mark.parametrize(
    "hidden_size, vocabulary, wanted, width",
    [
        (2000, 150_000, None, 2000), (2001, 150_000, None, None), (576, 49_152, None, 576), (4096, 152_064, None, None),
        (4096, 152_064, True, 4096), (576, 49_152, False, None), (None, 150_000, True, None),
    ],
)  # fmt: skip
def test_a_head_moves_a_fiftieth_of_the_logits_or_is_asked_for(
    hidden_size: int | None, vocabulary: int, wanted: bool | None, width: int | None
) -> None:
    assert head_width(hidden_size, vocabulary, wanted) == width


class Relay:
    """A group of two: what rank 0 sends, rank 1 gets."""

    world_size = 2

    def __init__(self, rank: int, sent: list[torch.Tensor]) -> None:
        self.rank_in_group, self.sent = rank, sent

    def broadcast(self, message: torch.Tensor, src: int) -> None:
        if self.rank_in_group == src:
            self.sent.append(message.clone())
        else:
            message.copy_(self.sent.pop(0))

    def broadcast_object(self, value: Any, src: int) -> Any:
        return value


def test_ranks_begin_with_what_rank_0_has_loaded(tmp_path: Path) -> None:
    """A file of coefficients that is not there for the other rank."""
    learned = context(tmp_path).verifier
    state = learned.estimator.state
    for tensor in (state.slopes, state.intercepts, state.labels[:, :K], state.gates):
        tensor.copy_(torch.rand(tensor.shape) * 100)
    learned.save(tmp_path / "learned.json")
    sent: list[torch.Tensor] = []
    first = context(tmp_path, ranks=Ranks(Relay(0, sent)), coefficients=str(tmp_path / "learned.json"))
    second = context(tmp_path, ranks=Ranks(Relay(1, sent)))
    for name in ("slopes", "intercepts", "labels", "gates"):
        mine, theirs = (getattr(each.verifier.estimator.state, name) for each in (first, second))
        assert torch.equal(mine, theirs), name
        assert mine.any(), name


class Group:
    """Rank 0 of a group of SGLang's whose other ranks hold `others`."""

    rank_in_group = 0

    def __init__(self, others: list[torch.Tensor]) -> None:
        self.world_size, self.others = len(others) + 1, others

    def all_gather_into_tensor(self, out: torch.Tensor, own: torch.Tensor) -> None:
        out.copy_(torch.cat([own, *(each.reshape(-1) for each in self.others)]))


@pytest.mark.parametrize("kept", [{}, {"entropy": True}, {"entropy": True, "history": True}])
def test_a_split_head_scores_as_the_whole_one(tmp_path: Path, kept: dict[str, bool]) -> None:
    torch.manual_seed(0)
    slots, logits = torch.tensor([2, 5]), torch.randn(2, K, VOCAB) * 4
    whole, split = (context(tmp_path, settings=Settings(**kept)) for _ in range(2))
    for each in (whole, split):
        each.reset(slots, [request(top_k=1), request()])
        each.verifier.estimator.state.offsets[slots] = torch.tensor([0.5, -1.0])
        each.begin(slots)
    drawn = logits.argmax(-1)
    whole.verifier.score(logits, slots, tokens=drawn)
    left, right = logits[..., :7].contiguous(), logits[..., 7:].contiguous()
    token = (right.argmax(-1) + 7).float()
    parts = entropy_partial(right) if kept else logit_max_partial(right)
    split.ranks = Ranks(Group([torch.stack([*parts, token])]))
    assert torch.equal(split.score_shard(left, 0, first=0), drawn)
    for name in ("features", "scores", *(["entropies"] if kept else []), *(["gaps"] if "history" in kept else [])):
        got, want = (getattr(each.verifier.estimator.state, name) for each in (split, whole))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0, equal_nan=True)


class Follower:
    """Two ranks of a group, one after the other: rank 1 receives what rank 0 has broadcast."""

    world_size = 2

    def __init__(self, rank: int, messages: list[torch.Tensor]) -> None:
        self.rank_in_group, self.messages = rank, messages

    def broadcast(self, message: torch.Tensor, src: int) -> None:
        if self.rank_in_group == src:
            self.messages.append(message.clone())
        else:
            message.copy_(self.messages.pop(0))


def test_every_rank_plans_and_learns_with_what_rank_0_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    slots, logits, messages = torch.tensor([2, 5]), torch.randn(2, K, VOCAB) * 4, list[torch.Tensor]()
    both = [context(tmp_path, settings=Settings(entropy=True, history=True)) for _ in range(2)]
    for rank, each in enumerate(both):
        each.ranks = Ranks(Follower(rank, messages))
        each.begin(slots)
        each.verifier.score(logits * (1 + 0.1 * rank), slots, tokens=torch.full((2, K), rank))
        each.plan()
    assert not messages
    for name in ("features", "scores", "entropies", "gaps"):
        first, second = (getattr(each.verifier.estimator.state, name)[slots] for each in both)
        assert torch.equal(first, second), name


def test_padding_rows_of_a_split_head_reach_no_request(tmp_path: Path) -> None:
    each = context(tmp_path)
    each.reset(torch.arange(SLOTS), [request()] * SLOTS)
    each.begin(torch.tensor([1]))
    each.ranks = Ranks(Group([torch.zeros(3, 4, K)]))
    each.score_shard(torch.randn(4, K, VOCAB), 0, first=0)  # a graph for four rows, one of them a request
    scored = (each.verifier.estimator.state.scores[:SLOTS, 0] >= 0).nonzero().flatten()
    assert scored.tolist() == [1]


def test_the_host_goes_by_the_proposal_of_two_steps_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    each = context(tmp_path, settings=Settings(exploration=0.0))
    proposed: list[tuple[int, int]] = []
    for slots in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], [0, 1, 2], [0, 1, 2, 6], [6], [1, 2, 3, 4, 5, 6]):
        rows = len(slots)
        if len(proposed) < 2:
            each.reset(torch.tensor(slots), [request()] * rows)
        each.begin(torch.tensor(slots))
        each.score(torch.randn(rows, K, VOCAB) * 6)
        expected = rows * K
        if len(proposed) >= LAG:
            budget, then = proposed[-LAG]
            expected = min(budget * rows // then, expected)
        assert each.host_budget() == expected
        plan = each.plan(budget=each.host_budget())
        assert int(plan.admitted.sum()) == expected
        proposed.append((int(plan.proposal), rows))
        each.observe(torch.zeros(rows, dtype=torch.int64))
        each.end()
    assert len({budget / rows for budget, rows in proposed}) > 2


def test_a_fixed_budget_is_not_scaled(tmp_path: Path) -> None:
    each = context(tmp_path, settings=Settings(policy="fixed", fixed_budget=5))
    for slots in ([0, 1, 2], [0, 1], [0, 1], [3]):
        each.begin(torch.tensor(slots))
        assert each.host_budget() == min(5, K * len(slots))
        each.plan(budget=each.host_budget())


def test_a_device_one_step_behind_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host begins a step when the device ends the last but one; the device takes 4 ms for each token."""
    times = step_times.StepTimes(CostTable(draft=[(1, 1e-6)], verify=[(1, 1.0), (9, 9.0)]), 1, 9, behind=1)
    prefill = 25
    work = [2, 9, 3, prefill, 5, 7, 4, 6]
    ends = [0.0, 0.0, *(0.004 * end for end in itertools.accumulate(work))]
    for now, tokens in zip(ends, work, strict=False):
        monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda now=now: now))
        if tokens == prefill:
            times.interrupt()
        else:
            times.begin()
            times.plan(1, tokens)
    timed = {tokens: values for (_, tokens), values in times._samples.items()}
    assert timed == {tokens: [pytest.approx(4.0 * tokens)] for tokens in (2, 5, 7)}


def test_a_step_that_drafted_less_stands_for_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting costs 8 ms and a token 1 ms; a quarter of the positions was drafted."""
    times = step_times.StepTimes(CostTable(draft=[(1, 8.0)], verify=[(1, 1.0), (9, 9.0)]), 1, 9)
    for now in (0.0, 0.005):
        monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda now=now: now))
        times.begin()
        times.plan(1, 3, drafted=0.25)
    assert times.timed == (1, pytest.approx(5.0), pytest.approx(2.0 + 3.0))
    assert times._samples == {(1, 3): [pytest.approx(8.0 + 3.0)]}


def test_costs_follow_live_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take three times what was predicted for them."""
    clock = itertools.count(0.0, 0.243)
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    each = context(tmp_path, refine_interval=20)
    before = each.times.table
    each.reset(torch.tensor([0]), [request()])
    for _ in range(60):
        each.begin(torch.tensor([0]))
        each.times.plan(requests=1, tokens=40)
        each.end()
    now = each.times.table
    assert before is not None
    assert now is not None
    dense, old = now.dense(1, 40), before.dense(1, 40)
    assert 1.3 * (old.draft[1] + old.verify[40]) < dense.draft[1] + dense.verify[40] < 243.0
    assert float(each.verifier.planner._costs.verify[40]) == pytest.approx(float(dense.verify[40]))


def test_acceptance_is_cut_at_what_was_verified() -> None:
    plan = SimpleNamespace(verify_lens=torch.tensor([1, 3, 5], dtype=torch.int32))
    cut = ragged.cut(torch.tensor([2, 2, 1]), plan)
    assert cut.accepted.tolist() == [0, 2, 1]
    assert cut.over.tolist() == [True, False, False]
    assert cut.trimmed.tolist() == [2, 0, 0]
    assert cut.accepted.dtype == torch.int64


def test_predicted_and_measured_step_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs: 1 ms for drafting, and 2 ms of tokens each."""
    clock = iter([0.0, 0.005, 0.012, 0.1, 0.1, 0.2])
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    each = context(tmp_path)
    times, slots = each.times, torch.tensor([3])
    each.begin(slots)
    times.plan(requests=1, tokens=1)
    each.begin(slots)
    times.plan(requests=1, tokens=3)
    each.begin(slots)
    assert times.timed == (2, pytest.approx(12.0), pytest.approx(3.0 + 7.0))
    times.plan(requests=1, tokens=5)
    each.reset(slots, [request()])
    each.begin(slots)
    assert times.timed.steps == 2
    # Before there are costs nothing is counted.
    times.use(None)
    times.plan(requests=1, tokens=5)
    each.begin(slots)
    times.plan(requests=1, tokens=5)
    each.begin(slots)
    assert times.timed.steps == 2
