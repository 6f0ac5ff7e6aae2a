"""What the package ships to be tried at once: two-digit additions, and a policy of 1.1 million parameters that forgets to carry.

    recipe.yaml               the run that `scripts/train_grpo.sh` starts without --config
    train.jsonl, val.jsonl    problems such as 17+25= with their answers; the held-out ones occur nowhere else, nor turned round
    model/                    a Llama in bfloat16 with a SentencePiece tokenizer

scripts/pretrain_demo.py makes data and model. The policy was pretrained on arithmetic with mostly wrong answers: it read right sums until
it could add, then sums of which two in three were wrong (the carry forgotten, or one off). So it is right about one time in three, and
GRPO has to find out which of its habits is rewarded; it learns no arithmetic that was not in the weights.
"""

from megagrpo.config.paths import DEMO as DEMO_DIR
from megagrpo.config.paths import resolve_model_path

MODEL_DIR = resolve_model_path("demo")
TRAIN_FILE, VAL_FILE = DEMO_DIR / "train.jsonl", DEMO_DIR / "val.jsonl"

__all__ = ["DEMO_DIR", "MODEL_DIR", "TRAIN_FILE", "VAL_FILE"]
