"""What of the environment is missing, before anything runs. Status 1 where nothing can run."""

import importlib
import platform
import sys

NEEDED = ("torch", "triton", "numpy", "msgspec")
USEFUL = ("pytest", "pytest_benchmark", "scipy", "sklearn", "hypothesis", "matplotlib", "rich", "typer")


def version(name: str) -> str | None:
    try:
        return str(getattr(importlib.import_module(name), "__version__", "present"))
    except ImportError:
        return None


def main() -> int:
    found = {name: version(name) for name in NEEDED + USEFUL}
    print(f"python {platform.python_version()} on {platform.machine()}")
    for name, number in found.items():
        print(f"{name} {number or 'missing'}")
    if found["torch"]:
        import torch

        print(torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")
    needed = [name for name in NEEDED if found[name] is None]
    useful = [name for name in USEFUL if found[name] is None]
    print(f"missing: {', '.join(needed + useful) or 'nothing'}")
    return int(bool(needed))


if __name__ == "__main__":
    sys.exit(main())
