# Study of the 107 M model and the tiny hybrid. Everything in /tmp/s; logs to $OUT.
set -u; export PYTHONPATH=. PYTHONUNBUFFERED=1; mkdir -p /tmp/s; R=/tmp/s; t0=$(date +%s); T() { echo "== $* at $(( $(date +%s)-t0 ))"; }
S=$(python3 -c "import numpy,os;print(os.path.dirname(os.path.dirname(numpy.__file__)))"); echo S=$S
ALL=""; for p in numpy scipy jax flax transformers sympy optax pandas networkx; do [ -d $S/$p ] && ALL="$ALL $S/$p"; done; echo "$ALL" | tee $R/all
M() { f=$1; shift; XLA_PYTHON_CLIENT_MEM_FRACTION=$f "$@"; }
( M .22 python3 scripts/train_lm.py --config .study/hybrid.json --data $S/numpy $S/scipy $S/sympy --out $R/hybrid --work $R/whybrid --context 512 --batch 32 --lr 1.5e-3 --minutes 2.4 >$OUT/hybrid_lm.log 2>&1; echo "hybrid lm rc $?"
  M .22 python3 scripts/train_drafter.py --method mtp --model $R/hybrid --data $S/numpy $S/scipy $S/sympy --out $R/hybrid-mtp --work $R/whmtp --length 512 --batch 16 --minutes 2 >$OUT/hybrid_mtp.log 2>&1; echo "hybrid mtp rc $?" ) &
HY=$!
M .5 python3 scripts/train_lm.py --data $ALL --out $R/model --work $R/wmodel --vocab 8192 --hidden 768 --layers 16 --heads 12 --kv-heads 4 --ff 2048 --batch 48 --lr 1e-3 --minutes ${LM:-3.4} >$OUT/lm.log 2>&1; echo "lm rc $?"; T lm
q() { n=$1; shift; JAX_PLATFORMS=cpu nice -n 5 timeout 330 python3 scripts/quantize.py --model $R/model --data $ALL --samples 64 --held-out 8 --out $R/$n --no-symmetric --method "$@" >$R/$n.log 2>&1; echo "$n rc $?"; T $n; }
q gptq-4 gptq & q awq-4 awq & q gptq-3 gptq --bits 3 --format dense & q awq-3 awq --bits 3 --format dense & (q rtn-4 rtn; q rtn-3 rtn --bits 3 --format dense) &
M .45 timeout 80 python3 scripts/train_drafter.py --model $R/model --data $ALL --out $R/one --work $R/answers --length 512 --regenerate --regenerate-rows 4096 --regenerate-batch 256 --steps 1 >$OUT/answers.log 2>&1; echo "answers rc $?"; T answers
h() { n=$1; shift; M .15 python3 scripts/train_drafter.py --model $R/model --data $ALL --method $n --out $R/$n --work $R/w$n --length 512 --batch 32 --lr 1e-3 --regenerate --regenerate-rows 4096 --answers $R/answers --keep-text --minutes ${HM:-3.6} "$@" >$OUT/$n.log 2>&1; echo "$n rc $?"; T $n; }
h eagle3 & h mtp & h dflash --block-size 8 & h dspark --block-size 7 &
M .12 python3 scripts/train_lm.py --data $ALL --out $R/draft --work $R/wdraft --vocab 8192 --hidden 256 --layers 4 --ff 640 --batch 64 --lr 3e-3 --minutes ${HM:-3.6} >$R/draft.log 2>&1 &
sleep 1; wait; T all; ls $R
for f in lm hybrid_lm hybrid_mtp answers eagle3 mtp dflash dspark; do echo "--- $f"; tail -4 $OUT/$f.log | cut -c1-300; done; for n in rtn-3 awq-3 gptq-3 rtn-4 awq-4 gptq-4 draft; do echo "--- $n"; tail -2 $R/$n.log | cut -c1-250; done
