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

# What E2 can be told in ten minutes: the mixtures of recomputed MLP parts and offloading, and what they stand beside.
mixed=(--variant "ours: auto 75%" --variant "ours: auto 52%" --variant "ours: auto 34%, fc1" --variant "ours: auto 16%"
    --variant "ours: auto 10%" --variant "ours: attention" --variant recompute)
rivals=(--variant "ours: core_attn" --variant "ours: auto 90%" --variant save_on_cpu --variant TRL --variant megatron)

# One cell of E2 with Transformer Engine beside all rivals, in turn, and what `plan` chooses for its committed result:
# e2_cell ALGORITHM TOKENS.
e2_cell() {
    local layers=12 microbatches=2 few="fc1 of 4" most="fc1 of 10"
    if (($2 == 32768)); then layers=8 microbatches=1 few="fc1 of 3" most="fc1 of 7"; fi
    if (($2 == 65536)); then layers=4 microbatches=1 few="fc1 of 1" most="fc1 of 3"; fi
    run dense_rl --algorithm "$1" --sequence "$2" --impl transformer_engine --layers "$layers" --microbatches "$microbatches" \
        --host-memory 100 --variant "ours: attention" --variant "ours: auto 90%" --variant "ours: auto 75%" --variant "ours: auto 52%" \
        --variant "ours: auto 34%, $few" --variant "ours: auto 16%, $most" --variant "ours: auto 10%" \
        --variant recompute --variant save_on_cpu --variant TRL --variant "megatron: attention" \
        --planned "benchmarks/results/nvidia-h200/dense_$1_$2_transformer_engine.json"
}

# Transformer Engine's own offloading, of half the layers and of all but one, in the same cell: e2_own ALGORITHM TOKENS.
e2_own() {
    local layers=12 microbatches=2
    if (($2 == 32768)); then layers=8 microbatches=1; fi
    if (($2 == 65536)); then layers=4 microbatches=1; fi
    run dense_rl --algorithm "$1" --sequence "$2" --impl transformer_engine --layers "$layers" --microbatches "$microbatches" \
        --variant "Transformer Engine" --variant "ours: auto 52%" --variant "ours: attention, recomputed fc1"
}

run() {
    if ((SECONDS >= limit_s)); then echo "no time is left" && return 124; fi
    timeout $((limit_s - SECONDS)) python3 -W ignore "benchmarks/$1.py" --out "$out" "${@:2}"
}

part() {
    case $1 in
    # In the order of importance.
    e1) run deepseek_layers --impl transformer_engine --inflight 2 --trace ;;
    e1-torch) run deepseek_layers --impl torch ;;
    e2) run dense_rl --sequence 8192 ;;
    e2-te) run dense_rl --sequence 8192 --impl transformer_engine --layers 12 "${mixed[@]}" "${rivals[@]}" ;;
    e2-te-sft) run dense_rl --sequence 8192 --algorithm sft --impl transformer_engine --layers 12 "${mixed[@]}" ;;
    e2-te-64k) run dense_rl --sequence 65536 --impl transformer_engine --layers 4 --microbatches 1 --rounds 1 --variant recompute \
        --variant "ours: attention" --variant "ours: auto 34%, fc1" "${rivals[@]:4}" ;;
    e3) run rl_reality --impl transformer_engine ;;
    e4) run reach --impl transformer_engine --variant "recompute: full" ;;
    e4-ours) run reach --impl transformer_engine --variant "ours: full recompute" ;;
    stash) timeout $((limit_s - SECONDS)) benchmarks/stash_on_device.sh "$out" ;;
    profile) run profile_step ;;
    e2-grpo-*k | e2-sft-*k) size=${1##*-} name=${1#e2-} && e2_cell "${name%-*}" $((${size%k} * 1024)) ;;
    e2-own-*k) size=${1##*-} name=${1#e2-own-} && e2_own "${name%-*}" $((${size%k} * 1024)) ;;
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
