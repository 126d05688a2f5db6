#!/usr/bin/env bash
# A new user's way through the suite in 17 steps, each checked by what it leaves and says.
#
#   tests/walk.sh                       in an environment where fedcl_bench is installed
#   BENCH="python -m fedcl_bench" PYTHON=python3.11 KEEP=1 tests/walk.sh
#
# BENCH is the command, PYTHON the interpreter that it is installed for. Everything happens in a temporary folder, which
# KEEP=1 leaves there. Takes some minutes on two cores and needs no network.
set -euo pipefail

OWN=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/user_plugins
read -r -a BENCH <<< "${BENCH:-run_bench.py}"
PYTHON=${PYTHON:-python}
WALK=$(mktemp -d "${TMPDIR:-/tmp}/fedcl-walk.XXXXXX")
[ -n "${KEEP:-}" ] || trap 'rm -rf "$WALK"' EXIT
cd "$WALK"
STEP=0
QUICK=(--set rounds=8)

fail() { printf '\nstep %s failed: %s\n' "$STEP" "$1" >&2; tail -n 30 out err >&2 2> /dev/null || true; exit 1; }
step() { STEP=$((STEP + 1)); printf '\n%2d. %s (after %d s)\n' "$STEP" "$1" "$SECONDS"; }

# Run a command of the suite; its output is in the files out and err.
bench() {
    printf '    $ run_bench.py %s\n' "$*"
    "${BENCH[@]}" "$@" > out 2> err < /dev/null || fail "exit status $?"
}

# Run one that is to be refused with exit status 2, in two lines at most, the words among them.
refused() {
    local words=$1 status=0
    shift
    printf '    $ run_bench.py %s\n' "$*"
    "${BENCH[@]}" "$@" > out 2> err < /dev/null || status=$?
    [ "$status" = 2 ] || fail "exit status $status, expected 2"
    [ "$(wc -l < err)" -le 3 ] || fail "more than a few lines"
    grep -qF -- "$words" err || fail "does not say '$words'"
    sed 's/^/      /' err
}

says() { grep -qE -- "$1" out err || fail "does not say '$1'"; }
holds() { [ -s "$1" ] || fail "no file $1"; [ -z "${2:-}" ] || grep -qE -- "$2" "$1" || fail "$1 does not hold '$2'"; }
check() { "$PYTHON" - "$@" || fail "what it left is not as expected"; }
records() { find results/runs -name run.json | wc -l; }

step "What is installed: the version, the environment, the help"
bench --version
says '^fedcl_bench [0-9]+\.[0-9]+'
bench doctor
says '^ok +torch'
bench --help
says 'the main job'

step "A table of one's own: 100,000 orders with columns and ids of a shop"
"$PYTHON" - << 'PY'
import csv, datetime, pathlib
import importlib.util
folder = pathlib.Path(importlib.util.find_spec("recbole").origin).parent / "dataset_example/ml-100k"
with open(folder / "ml-100k.inter") as source, open("orders.csv", "w", newline="") as target:
    next(source)
    rows = csv.writer(target)
    rows.writerow(["customer", "article", "stars", "bought_at"])
    for user, item, rating, time in csv.reader(source, delimiter="\t"):
        when = datetime.datetime.fromtimestamp(int(float(time)), datetime.timezone.utc).isoformat()
        rows.writerow([f"c{user}", f"a{item}", rating, when])
PY
head -n 3 orders.csv | sed 's/^/      /'

step "Convert it; a wrong column is answered with those that there are"
refused "its columns are customer, article, stars, bought_at" \
    data convert --table orders.csv --user customer --item article --time date shop
bench data convert --table orders.csv --user customer --item article --time bought_at --rating stars --keep '>=3' shop
says '82,520 interactions of 943 users and 1,574 items, from 1997-09-20 to 1998-04-22'
says 'left out: 17,480 rows'
NEXT=$(sed -n 's/^next: run_bench.py //p' out)
holds data/shop/shop.inter '^user_id:token'

step "Look at its blocks as the conversion suggests; it is listed like the others"
# shellcheck disable=SC2086
bench $NEXT
says '# of interactions +49,512 +11,002'
bench list
says '^  shop +data/shop/shop.inter'
bench list ft --all
says 'rounds = 100'

step "Run a method on it"
bench --method f3crec --backbone fedmf --dataset shop "${QUICK[@]}"
says 'block 3: 8 rounds'
says '^ ndcg@20 +0\.[0-9]{4}'
says '^ test users +584 '
cp out first
[ "$(records)" = 1 ] || fail "not one record"

step "Run it again: the record answers, with the same numbers"
bench --method F3CRec --backbone FedMF --dataset data/shop "${QUICK[@]}"
says '^from its record'
diff <(grep '^ [a-z]*@20' first) <(grep '^ [a-z]*@20' out) || fail "other numbers"
[ "$(records)" = 1 ] || fail "another record"

step "Stop a run with Ctrl-C; the same command goes on, to the numbers of an uninterrupted one"
LONG=(--method ft --backbone fedmf --dataset shop --set rounds=300 --set patience=0)
"${BENCH[@]}" "${LONG[@]}" > out 2> err < /dev/null &
RUN=$!
for _ in $(seq 600); do grep -q 'block 0:' err && break; sleep 0.1; done
kill -INT $RUN
STATUS=0
wait $RUN || STATUS=$?
[ "$STATUS" = 130 ] || fail "exit status $STATUS, expected 130"
says 'goes on from there'
[ "$(find results -name checkpoint.pt | wc -l)" = 1 ] || fail "no checkpoint"
bench "${LONG[@]}"
cp out resumed
bench "${LONG[@]}" --results elsewhere --quiet
diff <(grep '^ [a-z]*@20' resumed) <(grep '^ [a-z]*@20' out) || fail "other numbers than without interruption"

step "A method of one's own, from the template; edit it: another default"
bench new-plugin method my-ewc
says 'check my-ewc --plugins my_plugins'
holds my_plugins/my_ewc.py 'class MyEwc\(Method\)'
holds my_plugins/tests/test_my_ewc.py
sed -i 's/setting(0\.5,/setting(0.2,/' my_plugins/my_ewc.py
bench list my-ewc --plugins my_plugins
says 'decay = 0\.2'

step "Check it: is it correct, federated and continual?"
bench check my-ewc --plugins my_plugins
says 'all properties hold'

step "Three methods and a backbone written from the pages alone: check each, and run them"
cp -r "$OWN" own
bench check ewc --plugins own --with fedmf
says 'all properties hold'
bench check fedprox --plugins own --with ncf
says 'all properties hold'
bench check norm-weighted --plugins own --with fedmf
says 'all properties hold'
bench check two-tower --plugins own --with ft
says 'all properties hold'
bench grid --methods ewc,fedprox,norm-weighted --backbones two-tower --datasets shop --plugins own "${QUICK[@]}" \
    --results own-results
says '3 of 3 runs finished, 3 of them now'

step "Run it, and compare it with another"
bench --method my-ewc --backbone fedmf --dataset shop --plugins my_plugins "${QUICK[@]}" --quiet
says '^my-ewc on fedmf, shop'
bench --method ft --backbone fedmf --dataset shop "${QUICK[@]}" --quiet
bench compare my-ewc ft --backbone fedmf --dataset shop --plugins my_plugins "${QUICK[@]}"
says '^ ft +[-+]0\.[0-9]{4} '
refused "grid --methods reg --backbones fedmf --datasets shop" \
    compare my-ewc reg --backbone fedmf --dataset shop --plugins my_plugins "${QUICK[@]}"

step "Tune it on validation data, with the same budget for both"
bench tune --methods ft,my-ewc --backbones fedmf --datasets shop --plugins my_plugins --budget 3 \
    --seeds 1 --sampler random "${QUICK[@]}"
says '^ my-ewc +fedmf +shop'
holds results/my-tuned/shop-fedmf-my-ewc.json '"decay"'
bench --method my-ewc --backbone fedmf --dataset shop --plugins my_plugins "${QUICK[@]}" --tuned
says 'tuned settings: of results/my-tuned'
says '^from its record'

step "Many runs: a grid with seeds; the second time nothing is left to run"
GRID=(grid --methods ft,kd,my-ewc --backbones fedmf,fedncf --datasets shop --seeds 3 --plugins my_plugins "${QUICK[@]}")
bench "${GRID[@]}" --dry-run
says '18 runs: 2 finished, 0 failed, 0 interrupted, 16 to run'
bench "${GRID[@]}"
says '18 of 18 runs finished, 16 of them now'
bench "${GRID[@]}"
says '18 of 18 runs finished, 0 of them now'

step "A table of them with tests against one method, in the terminal and as Markdown, CSV and LaTeX"
TABLE=(tables --methods ft,kd,my-ewc --datasets shop --metrics ndcg@20,recall@20 --against ft --plugins my_plugins
       "${QUICK[@]}")
bench "${TABLE[@]}" --format text
says '^ my-ewc +0\.[0-9]{4}'
says '3 seeds'
refused "Did you mean 'ndcg@20'" tables --metrics ndgc@20
bench "${TABLE[@]}" --format all --out tables
holds tables/table.md '^\| my-ewc \| '
holds tables/table.tex '\\begin\{tabular\}'
holds tables/table.csv '^,shop,fedmf,my-ewc,ndcg@20'

step "All records as one page to look at"
bench report --plugins my_plugins --out report.html
holds report.html 'Leaderboard'
holds report.html 'my-ewc'
grep -qE '<(script|link|img)[^>]+(src|href)=.?https?:' report.html && fail "the page loads something"
if command -v chromium > /dev/null; then
    # TMPDIR: chromium makes a socket there, whose path must be short.
    TMPDIR=/tmp chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
        --user-data-dir="$WALK/profile" --virtual-time-budget=20000 --dump-dom "file://$WALK/report.html" \
        > dom.html 2> err || fail "chromium"
    holds dom.html 'main-svg'
else
    echo "      not opened: chromium is not installed"
fi

step "Figures for print"
bench figures --datasets shop --backbones fedmf --methods ft,kd,my-ewc --plugins my_plugins "${QUICK[@]}" \
    --figure curves,forgetting --format png,pdf --out figures
holds figures/curves-shop-fedmf.pdf '^%PDF'
holds figures/forgetting-shop-fedmf-ndcg20.png

step "From Python: load the records, recommend to a customer with the ids of the table"
check << 'PY'
import fedcl_bench as fb
mine = fb.load("results", "My-EWC", "fedmf", dataset="data/shop", plugins="my_plugins", rounds=8, decay=0.2, lr=1.0)
user = mine.users["user"].iloc[0]
best = mine.recommend(user, k=5)
assert mine.seeds[0] == 0 and user.startswith("c") and best["item"].str.startswith("a").all() and len(best) == 5, best
PY

[ "$STEP" = 17 ] || fail "these were not 17 steps"
printf '\nall %s steps passed\n' "$STEP"
