set -u; export PYTHONPATH=. PYTHONUNBUFFERED=1; R=/tmp/s; t0=$(date +%s); T() { echo "== $* at $(( $(date +%s)-t0 ))"; }
S=$(python3 -c "import numpy,os;print(os.path.dirname(os.path.dirname(numpy.__file__)))")
SOME="$S/numpy $S/scipy $S/jax"
B() { n=$1; l=$2; shift 2; timeout $l python3 scripts/bench_drafters.py --model $R/model --data $SOME --run ngram chain:5 --run suffix chain:5 --run $R/draft chain:4 --run $R/mtp chain:3 --run $R/eagle3 chain:5 chain:7 tree:16:4:3 --run $R/dflash chain:7 tree:16:4:3 --run $R/dspark chain:7 tree:16:4:3 --run ngram+$R/eagle3 chain:7 --batches 4 --compilation-cache $R/programs --json "$@" >$OUT/$n.jsonl 2>$OUT/$n.err; echo "$n rc $?"; grep -v cuda_timer $OUT/$n.err | tail -70 | cut -c1-160; T $n; }
B bench0 ${L0:-200} --batch 1 4 16 64 --temperatures 0 --plot $OUT/bench0.png
B bench1 ${L1:-90} --batch 1 16 --temperatures 1
