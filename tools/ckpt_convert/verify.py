"""Prove that a Hugging Face model folder and a Megatron-Core distributed checkpoint hold the same model.

    python tools/ckpt_convert/verify.py --hf DIR --megatron DIR
    python tools/ckpt_convert/verify.py --hf DIR --megatron DIR --prompt "The capital of France is" --prompt "2 + 2 ="

Every tensor is compared by checksum, shape, type and largest difference; with --prompt, transformers' logits with Megatron's too, in
fp32. Prints a table. Exit status: 0 when all are equal, 1 with the names when anything differs, 2 for folders that cannot be read.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from command_line import parser, positive, progress_bar, run

if TYPE_CHECKING:
    from megagrpo.hf_mapping.convert import Comparison


def main() -> None:
    """Parse, compare, tell."""
    options = parser(__doc__, ("--hf", "Hugging Face model folder"), ("--megatron", "checkpoint folder"))
    options.add_argument("--all", action="store_true", help="one line for every tensor, not for every kind")
    options.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="compare logits on this text too; repeatable")
    options.add_argument("--tolerance", type=positive, default=1e-3, help="largest difference of logits that passes (default 1e-3)")
    arguments = options.parse_args()

    def work() -> int:
        import torch.distributed as dist

        from megagrpo.hf_mapping.convert import compare

        with progress_bar("comparing") as progress:
            comparisons = compare(arguments.hf, arguments.megatron, progress)
        wrong = [c.name for c in comparisons if not c.equal]
        if dist.get_rank() == 0:
            show_tensors(comparisons, every=arguments.all)
        if arguments.prompt:
            wrong += compare_prompts(arguments)
        if dist.get_rank() == 0:
            print(f"{len(wrong)} differ: {', '.join(wrong)}" if wrong else f"all {len(comparisons)} tensors are equal, bit for bit")
        return 1 if wrong else 0

    run(work)


def show_tensors(comparisons: list[Comparison], *, every: bool) -> None:
    """A line for every kind of tensor, and for every tensor that differs."""
    from rich.console import Console
    from rich.table import Table

    table = Table("tensor", "count", "equal", "shape", "type", "checksum", "largest difference")
    for kind, members in groupby(sorted(comparisons, key=kind_of), key=kind_of):
        same = list(members)
        if not every:
            equal = sum(c.equal for c in same)
            if equal:
                table.add_row(kind, str(len(same)), str(equal), *described(next(c for c in same if c.equal))[:2], "", "0")
            same = [c for c in same if not c.equal]
        for comparison in same:
            difference = "" if comparison.max_difference is None else f"{comparison.max_difference:.3g}"
            table.add_row(comparison.name, "1", str(int(comparison.equal)), *described(comparison), difference)
    Console(width=200).print(table)


def kind_of(comparison: Comparison) -> str:
    """The name with its numbers left out."""
    return ".".join("*" if part.isdecimal() else part for part in comparison.name.split("."))


def described(comparison: Comparison) -> tuple[str, str, str]:
    """Shape, type and checksum, both where they differ."""

    def both(pair: tuple) -> str:
        shown = ["missing" if value is None else str(value) for value in pair]
        return shown[0] if shown[0] == shown[1] else f"{shown[0]} / {shown[1]}"

    return both(comparison.shape), both(comparison.dtype), both(comparison.checksum)


def compare_prompts(arguments) -> list[str]:
    """The prompts on which the logits differ."""
    from rich.console import Console
    from rich.table import Table

    from megagrpo.verify.logits import compare_logits

    table = Table("prompt", "tokens", "largest difference of logits", "same next token")
    wrong = []
    for prompt in compare_logits(arguments.hf, arguments.megatron, arguments.prompt):
        table.add_row(repr(prompt.text), str(prompt.num_tokens), f"{prompt.max_difference:.3g}", str(prompt.same_next_token))
        if not prompt.max_difference <= arguments.tolerance:
            wrong.append(f"the logits of {prompt.text!r}")
    Console(width=200).print(table)
    return wrong


if __name__ == "__main__":
    main()
