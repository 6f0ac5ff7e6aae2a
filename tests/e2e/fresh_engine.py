"""A vLLM engine started from an exported folder, with nothing of megagrpo in it: greedy tokens and log-probabilities as JSON.

fresh_engine.py HF_DIR PROMPTS_JSON OUT_JSON
"""

import json
import os
import sys
from pathlib import Path


def main(folder: str, prompts: list[list[int]], out: Path) -> None:
    os.environ.update(TORCHDYNAMO_DISABLE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind")
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=64, kv_cache_memory_bytes=2**26, logprobs_mode="processed_logprobs"
    )
    params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, stop_token_ids=[2], ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    logprobs = [[position[token].logprob for position, token in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    out.write_text(json.dumps([{"tokens": list(a.token_ids), "logprobs": lp} for a, lp in zip(answers, logprobs, strict=True)]))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3]))
