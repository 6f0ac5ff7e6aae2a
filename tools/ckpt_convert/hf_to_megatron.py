"""Convert a Hugging Face model folder into a Megatron-Core distributed checkpoint (torch_dist), which loads into any layout.

    python tools/ckpt_convert/hf_to_megatron.py --hf DIR --out DIR
    torchrun --nproc_per_node N tools/ckpt_convert/hf_to_megatron.py --hf DIR --out DIR     N processes share the work

No GPU is needed. The output is a model folder: config.json, tokenizer, chat template and generation config travel along, and
model.path may name it. It appears under its name when it is complete. The layout options change nothing in it: they say what it will
be trained in, which is checked against the model before anything is read.
"""

from __future__ import annotations

import time

from command_line import finished, parser, progress_bar, run

LAYOUT = ("tensor", "pipeline", "expert")


def main() -> None:
    """Parse, check, convert."""
    options = parser(__doc__, ("--hf", "Hugging Face model folder to read"), ("--out", "folder to write"))
    for kind in LAYOUT:
        options.add_argument(f"--{kind}-model-parallel-size", type=int, default=1, metavar="N", help=f"{kind} parallel size to check for")
    arguments = options.parse_args()
    sizes = {f"{kind}_model_parallel_size": getattr(arguments, f"{kind}_model_parallel_size") for kind in LAYOUT}

    def work() -> int:
        from megagrpo.hf_mapping.convert import hf_to_megatron

        started = time.monotonic()
        check_layout(arguments.hf, sizes)
        with progress_bar("hf -> megatron") as progress:
            hf_to_megatron(arguments.hf, arguments.out, progress)
        finished("Megatron checkpoint", arguments.out, started)
        return 0

    run(work)


def check_layout(folder, sizes: dict[str, int]) -> None:
    """Raise ValueError where the model cannot be spread like that."""
    from megagrpo.config.schema import Config
    from megagrpo.hf_mapping.folder import read_config
    from megagrpo.preflight.checks import check_model_layout

    problems = check_model_layout(Config.model_validate({"actor": sizes}), read_config(folder))
    if problems:
        raise ValueError("; ".join(problems))


if __name__ == "__main__":
    main()
