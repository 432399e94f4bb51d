"""Over gloo: four data-parallel replicas have the bits of one process that saw all the data; two ranks that are given
the same requests in different orders have the same bits, head and offsets included."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton

from av_triton import AcceptanceEstimator, AdaptiveVerifier, Settings
from av_triton.distributed import ReplicaRefit
from av_triton.ops.head import MINIBATCH, PENDING
from av_triton.ops.select import Q30
from tests import traffic
from tests.state import copies, differences

RANKS, ROWS, K, VOCAB, INTERVAL, STEPS = 4, 5, 3, 64, 6, 30


def settings(replicas: int, **other: object) -> Settings:
    options = {"policy": "fixed", "fixed_budget": RANKS * ROWS * K, "offset_prior": 2.0, **other}
    return Settings(refit_interval=INTERVAL, replicas=replicas, **options)


def serve(rows: slice, replicas: int, common: bool) -> AdaptiveVerifier:
    """The steps of those requests, every other one with exact labels. Every fifth step has none on the second replica,
    which takes part all the same."""
    count = rows.stop - rows.start
    verifier = AdaptiveVerifier(count, K, settings=settings(replicas))
    slots = torch.arange(count, dtype=torch.int32)
    verifier.reset(slots, torch.arange(rows.start, rows.stop, dtype=torch.int32) % 2)
    joined = ReplicaRefit(verifier) if common else None
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        logits = 4 * torch.randn(RANKS * ROWS, K, VOCAB, generator=generator)
        accepted = torch.randint(0, K + 1, (RANKS * ROWS,), generator=generator, dtype=torch.int32)
        acceptance = torch.rand(RANKS * ROWS, K, generator=generator)
        requests = torch.arange(rows.start, rows.stop)
        here = slots[(requests // ROWS != 1) | (step % 5 != 0)]
        verifier.score(logits[rows][here.long()], here)
        verifier.plan(here)
        exact = acceptance[rows][here.long()] if step % 2 else None
        verifier.observe(here, accepted[rows][here.long()], acceptance=exact)
        if joined is not None:
            assert joined.step() == ((step + 1) % INTERVAL == 0)
    return verifier


def replica(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    verifier = serve(slice(rank * ROWS, (rank + 1) * ROWS), RANKS, common=True)
    torch.save((verifier.coefficients(), verifier.estimator.state.offsets), folder / f"{rank}.pt")
    found = []
    for wrong in (settings(RANKS - (rank == 1)), settings(RANKS, damping=50.0 + rank)):
        try:
            ReplicaRefit(AdaptiveVerifier(ROWS, K, settings=wrong))
        except ValueError as error:
            found.append(str(error))
    # Another start on each replica: that of the first is taken over.
    other = AdaptiveVerifier(ROWS, K, settings=settings(RANKS, initial_intercept=float(rank)))
    ReplicaRefit(other)
    found.append(str(other.coefficients().intercepts))
    (folder / f"{rank}.txt").write_text("\n".join(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replicas")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=replica, args=(rank, folder)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
        assert process.exitcode == 0
    return folder


def test_every_replica_has_the_coefficients_and_offsets_of_one_process_that_saw_all(replicas: Path) -> None:
    found, offsets = zip(
        *(torch.load(replicas / f"{rank}.pt", weights_only=False) for rank in range(RANKS)), strict=True
    )
    verifier = serve(slice(0, RANKS * ROWS), 1, common=False)
    alone = verifier.coefficients()
    assert alone.refits == STEPS // INTERVAL
    assert alone.slopes != list(settings(1).initial_slopes)
    assert list(found) == [alone] * RANKS
    assert torch.equal(torch.cat(offsets), verifier.estimator.state.offsets)
    assert torch.cat(offsets).abs().max() > 0.1


def test_what_does_not_fit_is_refused(replicas: Path) -> None:
    """By every replica, also where one alone is wrong, for which the others would wait."""
    for rank in range(RANKS):
        many, differ, start = (replicas / f"{rank}.txt").read_text().split("\n")
        assert "Settings.replicas = 3: set it to 4 on each" in many
        assert "the replicas differ" in differ
        assert start == str([[0.0] * K] * 2)


def test_one_replica_alone_is_the_ordinary_refit(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        joined = serve(slice(0, ROWS), 1, common=True)
    finally:
        dist.destroy_process_group()
    assert joined.coefficients() == serve(slice(0, ROWS), 1, common=False).coefficients()


def test_a_replica_that_loads_a_file_still_refits_with_the_others_only(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        verifier = AdaptiveVerifier(ROWS, K, settings=settings(1))
        joined = ReplicaRefit(verifier)
        verifier.save(tmp_path / "fit.json")
        verifier.load(tmp_path / "fit.json")
        slots = torch.arange(ROWS)
        for _ in range(INTERVAL):
            verifier.score(torch.zeros(ROWS, K, VOCAB), slots)
            verifier.plan(slots)
            verifier.observe(slots, torch.full((ROWS,), K))
        before = verifier.coefficients()
        assert before.refits == 0
        for _ in range(INTERVAL):
            joined.step()
    finally:
        dist.destroy_process_group()
    assert verifier.coefficients().slopes != before.slopes


def test_what_the_first_replica_has_learned_keeps_its_weight(tmp_path: Path) -> None:
    """Else a loaded fit is replaced by the first interval's, and gates that are open cannot close."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        verifier = AdaptiveVerifier(ROWS, K, settings=settings(1))
        verifier.estimator.state.labels[:, :K] = torch.tensor([[3 * Q30], [5000 * Q30]])
        verifier.save(tmp_path / "fit.json")
        other = AdaptiveVerifier(ROWS, K, settings=settings(1))
        other.load(tmp_path / "fit.json")
        other.estimator.state.gates.fill_(Q30)
        ReplicaRefit(other)
    finally:
        dist.destroy_process_group()
    assert torch.equal(other.estimator.state.labels, verifier.estimator.state.labels)
    # Of the stratum with too few labels they are closed, whatever they were here.
    assert (other.estimator.state.gates > 0).tolist() == [[False, True]] * 2


def test_a_process_outside_of_the_group_is_told_so() -> None:
    with pytest.raises(ValueError, match="not in the group: construct ReplicaRefit on the members of a group alone"):
        ReplicaRefit(AdaptiveVerifier(ROWS, K, settings=settings(1)), dist.GroupMember.NON_GROUP_MEMBER)


def rank_of_two(rank: int, folder: Path, backend: str, steps: int) -> None:
    """Steps with head, offset and exact labels; each rank has the rows in an order of its own."""
    torch.set_num_threads(1)
    os.environ["AV_TRITON_BACKEND"] = backend
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    options = Settings(refit_interval=3, offset_prior=4.0)
    estimator = AcceptanceEstimator(traffic.SLOTS, traffic.K, settings=options, hidden_size=traffic.D)
    slots = torch.arange(traffic.SLOTS)
    estimator.reset(slots, slots.int() % 2)
    traffic.settle(estimator)
    if backend == "triton":  # so few steps fill no minibatch and open no gate
        estimator.state.head.counts[..., PENDING] = (MINIBATCH - 2) * Q30
        estimator.state.gates.fill_(Q30)
    orders = torch.Generator().manual_seed(rank)
    for step in traffic.traffic(8, steps):
        order = torch.randperm(traffic.ROWS, generator=orders)
        step.score(estimator, order)
        step.observe(estimator, order=order)
    states: list[dict[str, torch.Tensor]] = [{}, {}]
    dist.all_gather_object(states, copies(estimator.state))
    torch.save(states, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name, steps", [("torch", 300), ("triton", 4)])
def test_two_ranks_with_a_head_have_the_same_bits(tmp_path: Path, name: str, steps: int) -> None:
    if name == "triton" and not triton.knobs.runtime.interpret:
        pytest.skip("kernels on CPU tensors need TRITON_INTERPRET=1")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=rank_of_two, args=(rank, tmp_path, name, steps)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(500)
        assert process.exitcode == 0
    first, second = torch.load(tmp_path / "0.pt")
    assert not differences(first, second)
    assert bool((first["head.weights"] != 0).any())
    assert int(first["clock"][3]) == steps // 3
    assert bool((first["gates"] > 0).any())
