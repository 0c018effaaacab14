#!/usr/bin/env bash
# Run what a GPU has to show in a few minutes: commands with deadlines.
#
#     bash reproduce/gpu_calls.sh a reproduction/gpu    # what is right, and kernels: at most 330 s
#     bash reproduce/gpu_calls.sh b reproduction/gpu    # rounds, the server: at most 300 s
#     bash reproduce/gpu_calls.sh wheels wheels         # first, where there is a network: what a machine with PyTorch lacks
#
# Outputs and records are in the folder. A step that takes longer is ended (exit code 137), and the next begins. Exit code
# 1 if a step failed. For a machine with Python 3.12 and no network: `pip install --no-deps wheels/*` there.

set -u
out=$(realpath -m "${2:?a call and a folder are needed}") failed=0
case $1 in a | b | wheels) mkdir -p "$out" ;; esac
cd "$(dirname "$0")/.."

step() {  # SECONDS NAME COMMAND...
    echo "$2: at most $1 s"
    timeout --signal=KILL "$1" "${@:3}" > "$out/$2.txt" 2>&1 < /dev/null
    local code=$?
    echo "$2: exit code $code" | tee -a "$out/steps.txt"
    [ $code = 0 ] || failed=1
}

speed() {  # SECONDS NAME CELL...
    step "$1" "$2" python -m reproduce.gpu_speed --output "$out/gpu.jsonl" --cells "${@:3}"
}

gpu_tests() {  # SECONDS NAME COMMAND... of which pytest is a part, on GPU tests
    step "$1" "$2" "${@:3}" -m gpu -q tests/models/test_gpu_correctness.py
}

case $1 in
a)
    gpu_tests 150 right python -m pytest -n 6 --dist worksteal tests/engine/test_captured_rounds.py
    speed 50 linears linears
    speed 50 attention "bandwidth triton" rings "bandwidth flash"
    gpu_tests 40 memcheck compute-sanitizer --target-processes all python -m pytest -x \
        -k "selection and 3000-int8 or packing and 16-int8 or quantised"
    gpu_tests 40 racecheck compute-sanitizer --tool racecheck --target-processes all python -m pytest -x \
        -k "selection and 3000-int8 or packing and 16-int8"
    ;;
b)
    speed 120 8B "8B 32x16000" "8B 32x16000, drafts in 8 bits" "8B 32x16000, drafts in 4 bits" \
        "8B 32x16000, drafts in 4 bits, gamma 5"
    speed 50 8B-long "8B 32x28000, drafts in 4 bits, gamma 5"
    for n in 1 2 3; do
        step 25 "book-$n" python tests/selfspec_benchmark.py --B 22 --num_prompts 66 --prefix_len 2500 --gen_len 96 \
            --draft_weights same --compile --benchmark --temperature 0.6 --verification coupled --output "$out/book.jsonl"
    done
    step 55 server python -m reproduce.serve_load --clients 64 --server draft_budget=512 max_batch=64 device=cuda \
        --output "$out/serve_load.jsonl"
    ;;
wheels)
    pip download --no-deps --dest "$out" --only-binary=:all: --python-version=3.12 --platform=manylinux_2_28_x86_64 \
        --platform=manylinux_2_24_x86_64 --platform=manylinux2014_x86_64 --platform=any tyro==1.0.17 \
        docstring-parser==0.18.0 typeguard==4.6.1 gguf==0.19.0 fastapi==0.165.0 starlette==1.10.0 pydantic==2.14.4 \
        pydantic-core==2.50.5 annotated-types annotated-doc typing-inspection uvicorn==0.54.0 prometheus-client==0.26.0 \
        pytest-xdist==3.8.0 execnet==2.1.2 fa3-fwd==0.0.3
    failed=$?
    ;;
*)
    echo "error: $1 is not a, b or wheels" >&2
    exit 2
    ;;
esac
exit $failed
