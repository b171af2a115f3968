set -u; export PYTHONPATH=. PYTHONUNBUFFERED=1; R=/tmp/s; t0=$(date +%s); T() { echo "== $* at $(( $(date +%s)-t0 ))"; }
S=$(python3 -c "import numpy,os;print(os.path.dirname(os.path.dirname(numpy.__file__)))")
python3 scripts/generate.py --model $R/hybrid --drafter $R/hybrid-mtp --tree chain:3 --compare --pairs 3 --max-tokens 256 --temperature 0 2>&1 | grep -v cuda_timer | tail -15; T hybrid-compare
(XLA_PYTHON_CLIENT_MEM_FRACTION=.3 timeout 100 python3 scripts/measure_perplexity.py --model $R/model $R/rtn-4 $R/awq-4 $R/gptq-4 $R/rtn-3 $R/awq-3 $R/gptq-3 --data $S/numpy $S/scipy $S/jax --held-out 256 --batch 16 --json >$OUT/ppl.json 2>$OUT/ppl.err; tail -20 $OUT/ppl.err | cut -c1-150; T ppl) &
e() { n=$1; XLA_PYTHON_CLIENT_MEM_FRACTION=.1 timeout 100 python3 scripts/eval_drafter.py --model $R/$n --drafter $R/$2 --data $S/numpy $S/scipy --modes $3 --temperatures 0 --rules coupled --prompts 64 --max-tokens 96 --json >$OUT/e-$n.json 2>$OUT/x; tail -c 900 $OUT/e-$n.json; T eval-$n; }
e model eagle3 chain:5 & e gptq-4 eagle3 chain:5 & e awq-4 eagle3 chain:5 & e rtn-4 eagle3 chain:5 & e gptq-3 eagle3 chain:5 & e hybrid hybrid-mtp chain:3 &
wait
