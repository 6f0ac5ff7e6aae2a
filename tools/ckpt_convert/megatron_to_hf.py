"""Convert a Megatron-Core distributed checkpoint (torch_dist), saved from any layout, into a Hugging Face model folder.

    python tools/ckpt_convert/megatron_to_hf.py --megatron DIR --out DIR
    torchrun --nproc_per_node N tools/ckpt_convert/megatron_to_hf.py --megatron DIR --out DIR     N processes share the work

No GPU is needed. The checkpoint's folder must hold the model's config.json, as hf_to_megatron.py and the trainer leave it; tokenizer,
chat template and generation config travel along. The output appears under its name when it is complete.
"""

from __future__ import annotations

import time

from command_line import finished, parser, positive, progress_bar, run


def main() -> None:
    """Parse and convert."""
    options = parser(__doc__, ("--megatron", "checkpoint folder to read"), ("--out", "folder to write"))
    options.add_argument("--max-file-gb", type=positive, default=5.0, metavar="GB", help="size of a weights file at most (default 5)")
    arguments = options.parse_args()

    def work() -> int:
        from megagrpo.hf_mapping.convert import megatron_to_hf

        started = time.monotonic()
        with progress_bar("megatron -> hf") as progress:
            megatron_to_hf(arguments.megatron, arguments.out, progress, max_file_bytes=int(arguments.max_file_gb * 10**9))
        finished("Hugging Face model", arguments.out, started)
        return 0

    run(work)


if __name__ == "__main__":
    main()
