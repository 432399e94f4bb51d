"""The kernels compile with every Triton version that is supported, each installed for this test alone."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", [v for v in VERSIONS if v != triton.__version__])
def test_kernels_keep_their_limits(version: str, tmp_path: Path) -> None:
    where = tmp_path / "triton"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(where)]
    done = subprocess.run([*pip, f"triton=={version}"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"triton {version} cannot be installed here: {done.stderr.strip()[-300:]}")
    table = tmp_path / "table.csv"
    code = "import sys; from av_triton.aot import app; app(args=sys.argv[1:])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(where), os.getcwd())), "COLUMNS": "200"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, "--csv", str(table)], env=env, capture_output=True, text=True, check=False
    )
    assert f"triton {version}:" in done.stdout, done.stderr
    violations = [row for row in csv.DictReader(table.open()) if row["violations"]]
    assert done.returncode == 0, violations
    assert not violations
