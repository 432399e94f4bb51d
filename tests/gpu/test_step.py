"""The whole step on the device: captured and replayed, without a wait and without an allocation, on any stream."""

import pytest
import torch

import av_triton as av

pytestmark = pytest.mark.gpu


class Step:
    """One decode step on inputs that stay at their addresses; with an offset, by exact labels."""

    def __init__(self, device, rows=64, positions=7, vocab=32_000, lag=2, **settings):
        cost = av.CostTable(draft=[(1, 1.0)], verify=[(1, 1.0), (8 * rows, 30.0)])
        self.verifier = av.AdaptiveVerifier(
            rows, positions, device, cost=cost, settings=av.Settings(lag=lag, **settings)
        )
        self.acceptance = torch.zeros(rows, positions, device=device) if "offset_prior" in settings else None
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.logits = torch.zeros(rows, positions, vocab, dtype=torch.bfloat16, device=device)
        self.accepted = torch.zeros(rows, dtype=torch.int32, device=device)
        self.temperature = torch.full((rows,), 0.8, device=device)
        self.verifier.reset(self.slots)

    def feed(self, seed):
        g = torch.Generator(self.logits.device).manual_seed(seed)
        self.logits.copy_(3 * torch.randn(self.logits.shape, generator=g, device=self.logits.device))
        high = self.logits.shape[1] + 1
        self.accepted.copy_(torch.randint(0, high, self.accepted.shape, generator=g, device=self.logits.device))
        if self.acceptance is not None:
            self.acceptance.copy_(torch.rand(self.acceptance.shape, generator=g, device=self.logits.device))

    def __call__(self):
        self.scores = self.verifier.score(self.logits, self.slots, temperature=self.temperature)
        self.plan = self.verifier.plan(self.slots)
        self.verifier.observe(self.slots, self.accepted, acceptance=self.acceptance)

    def outputs(self):
        state = self.verifier.estimator.state
        learned = state.slopes, state.intercepts, state.sums, state.offsets, state.residuals, state.gates
        found = (self.scores, *self.plan[:3], *learned, state.entropies)
        return [t.clone() for t in found if t is not None]


OFFSET = {"offset_prior": 4.0}  # and exact labels
KEPT = {"entropy": True, "history": True}


@pytest.mark.parametrize("settings", [{}, KEPT, OFFSET], ids=["plain", "entropy and history", "offset"])
def test_a_step_runs_and_learns(device, full, settings):
    size = {} if full else {"rows": 4, "positions": 3, "vocab": 100}
    step = Step(device, **size, **settings)
    for seed in range(40 if full else 3):
        step.feed(seed)
        step()
    assert step.verifier.coefficients().refits == (1 if full else 0)
    assert all(bool(t.isfinite().all()) for t in step.outputs())
    assert bool((step.verifier.estimator.state.offsets != 0).all()) == (settings is OFFSET)


@pytest.mark.parametrize("settings", [{}, {"entropy": True}, OFFSET], ids=["plain", "entropy", "offset"])
def test_replayed_from_one_graph_over_300_steps(cuda, settings):
    eager, captured = (Step(cuda, lag=0, **settings) for _ in range(2))
    captured()  # compiles
    captured = Step(cuda, lag=0, **settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    for seed in range(300):
        eager.feed(seed)
        captured.feed(seed)
        eager()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(eager.outputs(), captured.outputs(), strict=True)), seed
    assert captured.verifier.coefficients().refits == 300 // 32


@pytest.mark.parametrize("settings", [{}, OFFSET], ids=["plain", "offset"])
def test_the_steady_state_does_not_wait_or_allocate(cuda, settings):
    step = Step(cuda, **settings)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_two_verifiers_on_two_streams(cuda):
    alone, steps = Step(cuda), [Step(cuda), Step(cuda)]
    for step in (alone, *steps):
        step.feed(5)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        alone()
        for step, stream in zip(steps, streams, strict=True):
            with torch.cuda.stream(stream):
                step()
    torch.cuda.synchronize()
    for step in steps:
        assert all(torch.equal(a, b) for a, b in zip(step.outputs(), alone.outputs(), strict=True))
