"""A few steps at small shapes that launch every kernel of a step: what compute-sanitizer watches."""

import torch

import av_triton as av


def main(device: str) -> None:
    rows, positions = 9, 5
    for autoregressive, kept in ((False, False), (True, True)):
        cost = av.CostTable(draft=[(1, 1.0)], verify=[(1, 1.0), (64, 9.0)])
        settings = av.Settings(
            refit_interval=2, autoregressive=autoregressive, entropy=kept, history=kept, offset_prior=4.0
        )
        verifier = av.AdaptiveVerifier(rows, positions, device, cost=cost, settings=settings)
        slots = torch.arange(rows, dtype=torch.int32, device=device)
        slots[4] = -1
        accepted = torch.arange(rows, dtype=torch.int32, device=device) % positions
        segments = torch.tensor([0, 4, rows], dtype=torch.int32, device=device)
        verifier.reset(slots)
        for step in range(4):
            # 40,000 logits are several programs a row, with a partial block at the end.
            logits = torch.randn(rows, positions, 40_001, device=device).bfloat16()
            verifier.score(logits, slots, tokens=logits.argmax(-1))
            verifier.plan(slots, segments=segments if step % 2 else None)
            acceptance = torch.rand(rows, positions, device=device) if step % 2 else None
            verifier.observe(slots, accepted, acceptance=acceptance)
    print("done", verifier.coefficients().refits, "refits")


if __name__ == "__main__":
    main("cuda" if torch.cuda.is_available() else "cpu")
