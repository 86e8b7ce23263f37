#!/usr/bin/env bash
# Runs parts of the experiments on a GPU, together within ten minutes: run_on_device.sh OUT PART...
# Results of earlier parts that OUT has are gone on from. BENCH_COMMIT names the commit where there is no git.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
out=${1:?where the results go}
shift
mkdir -p "$out"
limit_s=${LIMIT_S:-580}

# The shape of a cell of E2 with Transformer Engine, and the layers whose first linear is recomputed: cell ALGORITHM TOKENS.
cell() {
    layers=12 microbatches=2 few="fc1 of 4" most="fc1 of 10"
    if (($2 == 32768)); then layers=8 microbatches=1 few="fc1 of 3" most="fc1 of 7"; fi
    if (($2 == 65536)); then layers=4 microbatches=1 few="fc1 of 1" most="fc1 of 3"; fi
    shape=(--algorithm "$1" --sequence "$2" --impl transformer_engine --layers "$layers" --microbatches "$microbatches")
    shape+=(--host-memory 100)
    mixtures=(--variant "ours: attention" --variant "ours: auto 52%" --variant "ours: auto 34%, $few" --variant "ours: auto 16%, $most")
    planned=(--planned "benchmarks/results/nvidia-h200/dense_$1_$2_transformer_engine.json")
}

# In two rounds: what fits twice into ten minutes, what `plan` chooses for the committed result among it.
e2_turns() { cell "$@" && run dense_rl "${shape[@]}" "${mixtures[@]}" --variant recompute --variant "megatron: attention" "${planned[@]}"; }

# All rivals and budgets; from 16k on ten minutes are enough for little more than one round.
e2_cell() {
    cell "$@" && run dense_rl "${shape[@]}" "${mixtures[@]}" --variant "ours: auto 90%" --variant "ours: auto 75%" --variant "ours: auto 10%" \
        --variant recompute --variant save_on_cpu --variant TRL --variant "megatron: attention" "${planned[@]}"
}

# Transformer Engine's own offloading, of half the layers and of all but one.
e2_own() {
    cell "$@" && run dense_rl "${shape[@]}" --variant "Transformer Engine" --variant "ours: auto 52%" \
        --variant "ours: attention, recomputed fc1"
}

run() {
    timeout $((limit_s - SECONDS)) python3 -W ignore "benchmarks/$1.py" --out "$out" "${@:2}"
}

part() {
    if ((SECONDS >= limit_s)); then echo "no time is left" && return 124; fi
    case $1 in
    # In the order of importance.
    e1) run deepseek_layers --impl transformer_engine --inflight 2 --trace ;;
    e1-torch) run deepseek_layers --impl torch ;;
    e2) run dense_rl --sequence 8192 ;;
    e3) run rl_reality --impl transformer_engine ;;
    e4) run reach --impl transformer_engine --variant "recompute: full" ;;
    e4-ours) run reach --impl transformer_engine --variant "ours: full recompute" ;;
    stash) timeout $((limit_s - SECONDS)) benchmarks/stash_on_device.sh "$out" ;;
    profile) run profile_step ;;
    e2-own-*k | e2-turns-*k | e2-cell-*k) # e2-turns-sft-16k
        local what algorithm size
        IFS=- read -r _ what algorithm size <<<"$1"
        "e2_$what" "$algorithm" $((${size%k} * 1024))
        ;;
    e2-4k | e2-16k | e2-32k | e2-64k) size=${1#e2-} && run dense_rl --sequence $((${size%k} * 1024)) ;;
    e2-sft) run dense_rl --sequence 8192 --algorithm sft ;;
    e4-rest) run reach --impl transformer_engine --variant nothing "ours: all" ;;
    e4-layers) run reach --impl transformer_engine --search layers ;;
    link) run link ;;
    *) echo "no part $1; see $0" && return 2 ;;
    esac
}

failed=0
for name in "$@"; do
    part "$name" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    echo "part $name: exit code $code, $SECONDS s since the start"
    failed=$((failed | code))
done
exit "$failed"
