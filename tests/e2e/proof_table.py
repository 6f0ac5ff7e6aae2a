"""The README's proof table: one step of the demo model in several layouts, on real Megatron and real vLLM, in fp32 on CPU.

python tests/e2e/proof_table.py        runs the layouts (two minutes) and writes the table into README.md
"""

import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]

LAYOUTS = [
    ("1", 1, {}, 1),
    ("TP2", 2, {"tensor_model_parallel_size": 2}, 1),
    ("TP2", 2, {"tensor_model_parallel_size": 2}, 2),
    ("PP2", 2, {"pipeline_model_parallel_size": 2}, 2),
    ("DP2", 2, {}, 1),
    ("TP2 PP2", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 2),
    ("PP2 DP2", 4, {"pipeline_model_parallel_size": 2}, 1),
]
COLUMNS = ["actor", "rollout", "loss", "grad norm", "sampled tokens", "vLLM - Megatron, largest log-prob difference", "tensors compared"]
MARKER = re.compile(r"(<!-- proof table: .*? -->\n).*?(<!-- end -->)", re.DOTALL)


def measure() -> str:
    """Run every layout; the table."""
    from test_stack_layouts import run

    from megagrpo.demo import MODEL_DIR

    rows, first = [], None
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, num_processes, actor, rollout_tp) in enumerate(LAYOUTS):
            report = run(
                MODEL_DIR,
                Path(folder) / str(number),
                num_processes=num_processes,
                actor=actor,
                rollout={"tensor_parallel_size": rollout_tp},
            )
            first = first or report
            tokens = {i: sample["tokens"] for i, sample in report["sampled"].items()}
            same = tokens == {i: sample["tokens"] for i, sample in first["sampled"].items()}
            num_tokens = sum(map(len, tokens.values()))
            metrics = report["metrics"]
            rows.append(
                [
                    name,
                    f"{num_processes // rollout_tp} x TP{rollout_tp}",
                    f"{metrics['actor/loss']:.7f}",
                    f"{metrics['actor/grad_norm']:.6f}",
                    f"{num_tokens}, {'the same' if same else 'DIFFERENT'}",
                    f"{metrics['mismatch/logprob_diff_max']:.1e}",
                    str(report["num_verified"]),
                ]
            )
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    readme = ROOT / "README.md"
    table = measure()
    text, count = MARKER.subn(lambda found: found[1] + table + found[2], readme.read_text())
    assert count == 1, "README.md has no place for the table"
    readme.write_text(text)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
