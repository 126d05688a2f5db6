"""Quality of FT, Reg, KD and F3CRec on FedMF over ML-100K beside the paper's Table 2.

    python benchmarks/quality.py [--seeds 5] [--set split_file=FILE] [--out results/NAME]

Runs what has no record yet and writes OUT.md and OUT.json: mean and standard deviation over seeds of N@20 and R@20 per
block, and the per-user paired tests of F3CRec against each of the others.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from fedcl_bench.config import make_config
from fedcl_bench.datasets import load_stream
from fedcl_bench.progress import Display
from fedcl_bench.records import Record
from fedcl_bench.registry import discover
from fedcl_bench.report import combined
from fedcl_bench.runner import execute
from fedcl_bench.settings import parse_assignments
from fedcl_bench.significance import compare_paired, holm

METHODS = ("ft", "reg", "kd", "f3crec")
# Lim et al., CIKM 2025, Table 2: ML-100K, FedMF, blocks 1-3 and their mean.
PAPER = {"ndcg@20": {"ft": (0.0794, 0.0768, 0.1002, 0.0855), "reg": (0.0904, 0.0876, 0.1078, 0.0953),
                     "kd": (0.0918, 0.0824, 0.1071, 0.0938), "f3crec": (0.0933, 0.0885, 0.1284, 0.1034)},
         "recall@20": {"ft": (0.1270, 0.1319, 0.1563, 0.1384), "reg": (0.1411, 0.1447, 0.1648, 0.1502),
                       "kd": (0.1512, 0.1422, 0.1625, 0.1520), "f3crec": (0.1564, 0.1531, 0.1944, 0.1680)}}


def user_scores(outcomes, metric):
    """One score per user: the metric on the block just trained, averaged over blocks 1.. and seeds."""
    frames = []
    for outcome in outcomes:
        users = Record(Path(outcome["record"])).users()
        frames.append(users[(users.metric == metric) & (users.trained_block == users.tested_block)
                            & (users.trained_block > 0)])
    return pd.concat(frames).groupby("user")["value"].mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="assignments", metavar="NAME=VALUE")
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--out", type=Path, default=Path("results/f3crec-fedmf-ml-100k"))
    args = parser.parse_args()
    registry, streams, done = discover(), [], {}
    for method in METHODS:
        done[method] = []
        for seed in range(args.seeds):
            config = make_config(registry, method, "fedmf", "ml-100k", seed,
                                 [("--set", parse_assignments(args.assignments, "--set"))])

            def load():
                if not streams:
                    streams.append(load_stream(config.source, config.stream))
                return streams[0]
            with Display(config) as display:
                done[method].append(execute(config, load, args.results, on_progress=display.update,
                                            warn=display.warn, note=display.note))
    lines, content = report(done, args)
    args.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    args.out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(lines))


def report(done, args):
    """The page and the compact record."""
    first = done["ft"][0]
    env = first["environment"]
    settings = " ".join(f"--set {a.split('=')[0]}={Path(a.split('=', 1)[1]).name}" for a in args.assignments)
    command = f"python benchmarks/quality.py --seeds {args.seeds} {settings}".strip()
    blocks = len(first["rounds"])
    lines = ["# FT, Reg, KD and F3CRec on FedMF over ML-100K", "", f"Made by `{command}`.",
             f"{env['processor']}, {env['cores']} cores, Python {env['python']}, torch {env['torch']}, "
             f"seeds 0-{args.seeds - 1}.", "",
             "R[t, t] per block and its mean over the incremental blocks; mean ± sample standard deviation over seeds. "
             "The paper prints one seed.", ""]
    content = {"command": command, "environment": env, "seeds": args.seeds, "settings": {}, "metrics": {},
               "significance": {}, "records": {}}
    for metric, label in (("ndcg@20", "N@20"), ("recall@20", "R@20")):
        heads = [f"D{t}" for t in range(blocks)] + [f"avg D1-D{blocks - 1}"]
        paper = PAPER[metric]
        lines += [f"## {label}", "", f"| method | {' | '.join(heads)} | paper D1 / D2 / D3 / avg |",
                  "|---" * (len(heads) + 2) + "|"]
        for method, outcomes in done.items():
            values = combined(outcomes)["metrics"][metric]
            means = [*values["per_block"], values["avg_incremental"]]
            stds = [*values["per_block_std"], values["avg_incremental_std"]]
            cells = [f"{m:.4f} ± {s:.4f}" for m, s in zip(means, stds)]
            printed = " / ".join(f"{x:.4f}" for x in paper[method])
            lines.append(f"| {method} | {' | '.join(cells)} | {printed} |")
            content["metrics"].setdefault(method, {})[metric] = {
                "mean": means, "std": stds, "avg_per_seed": [o["metrics"][metric]["avg_incremental"] for o in outcomes]}
        lines.append("")
        scores = {method: user_scores(outcomes, metric) for method, outcomes in done.items()}
        others = [m for m in METHODS if m != "f3crec"]
        tests = [compare_paired(scores["f3crec"].to_numpy(), scores[m].loc[scores["f3crec"].index].to_numpy())
                 for m in others]
        adjusted = holm([t.p for t in tests])
        lines += [f"F3CRec against each, {label}, per user (averaged over seeds and blocks 1-{blocks - 1}, n = "
                  f"{tests[0].n}):", "",
                  "| against | difference | 95 % bootstrap interval | t | p (paired t) | p (Holm) | p (sign flip) | d_z |",
                  "|---|---|---|---|---|---|---|---|"]
        for name, t, p in zip(others, tests, adjusted):
            lines.append(f"| {name} | {t.difference:+.4f} | {t.low:+.4f} ... {t.high:+.4f} | {t.t:.2f} | {t.p:.4f} | "
                         f"{p:.4f} | {t.p_permutation:.4f} | {t.effect:.3f} |")
            content["significance"].setdefault(metric, {})[name] = {**asdict(t), "p_holm": p}
        lines.append("")
        mine = [o["metrics"][metric]["avg_incremental"] for o in done["f3crec"]]
        if args.seeds > 1:
            lines += ["Over seeds, paired t-test of the averages (n = %d seeds): " % args.seeds + ", ".join(
                f"{m}: {np.mean(mine) - np.mean(theirs):+.4f}, p = {compare_paired(mine, theirs).p:.3f}"
                for m in others
                for theirs in [[o["metrics"][metric]["avg_incremental"] for o in done[m]]]) + ".", ""]
    for method, outcomes in done.items():
        content["records"][method] = [o["hash"] for o in outcomes]
        content["settings"][method] = {k: v for k, v in outcomes[0]["settings"].items() if k != "split_file"}
    seconds = [o["seconds"]["total"] for outcomes in done.values() for o in outcomes]
    lines.append(f"Seconds per run (block 0 counted in each): {np.mean(seconds):.1f} on average, "
                 f"{max(seconds):.1f} at most.")
    return lines, content


if __name__ == "__main__":
    main()
