#!/usr/bin/env bash
# Everything that has to be seen on a GPU, in 8 minutes and without a network:
#   bash benchmarks/gpu/run.sh [OUT] [--dry-run]
# Tests, races and timings go to OUT (default build/gpu); a short table comes last. --dry-run: the same steps without a
# device, the tests in Triton's interpreter. PYTHON chooses the interpreter (default python3).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

out=build/gpu dry=
for argument in "$@"; do
    case $argument in
        --dry-run) dry=1 ;;
        -*) echo "unknown option $argument: give [OUT] [--dry-run]" >&2; exit 2 ;;
        *) out=$argument ;;
    esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
results=$out/results.tsv
: > "$results"
begin=$SECONDS

# step NAME SECONDS COMMAND...: run it within its share of the time, log it, note how it ended.
step() {
    local name=$1 limit=$2 started=$SECONDS status=ok
    shift 2
    timeout --kill-after=10 "$limit" "$@" > "$out/$name.log" 2>&1
    local code=$?
    case $code in
        0) ;;
        77) status=skipped ;;
        124 | 137) status="out of time" ;;
        *) status="FAILED ($code)" ;;
    esac
    printf '%s\t%s\t%s s\t%s\n' "$name" "$status" $((SECONDS - started)) "$(tail -n 1 "$out/$name.log")" >> "$results"
}

has() { "$python" -c "import $1" 2> /dev/null; }

# Settings of its own: the project's ask for pytest-timeout, which a GPU image may lack.
pytest=("$python" -m pytest -c benchmarks/gpu/pytest.ini --rootdir . -p no:cacheprovider -q tests/gpu)

# sanitize TOOL: under compute-sanitizer where it is installed and works on this machine.
sanitize() {
    if [[ -n $dry ]] || ! command -v compute-sanitizer > /dev/null; then
        step "$1" 10 bash -c 'echo "compute-sanitizer: not run here"; exit 77'
    else
        step "$1" 30 compute-sanitizer --tool "$1" --error-exitcode 1 "$python" -m benchmarks.gpu.small
    fi
}

step missing 60 "$python" -m benchmarks.gpu.missing
if has pytest; then
    if [[ -n $dry ]]; then
        TRITON_INTERPRET=1 AV_TRITON_BACKEND=triton AV_TRITON_GPU_DRY_RUN=1 step tests 130 "${pytest[@]}"
    else
        step tests 130 "${pytest[@]}"
    fi
else
    step tests 10 bash -c 'echo "pytest is missing"; exit 77'
fi
sanitize memcheck
sanitize racecheck
if has rich && has typer; then
    step bench 220 "$python" -m benchmarks.kernels.run --out "$out/bench" --seconds 90
else
    step bench 10 bash -c 'echo "rich or typer is missing"; exit 77'
fi

echo "step | result | time | last line"
column -t -s $'\t' "$results" 2> /dev/null || cat "$results"
echo "$((SECONDS - begin)) s; logs and tables in $out${dry:+; dry run: nothing ran on a device}"
! grep -q 'FAILED\|out of time' "$results"
