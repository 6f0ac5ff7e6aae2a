"""One rank of test_layouts.py: for every layout, forward and backward of a tiny model through mcore/pipeline.py, results to files.

Arguments: a JSON file {"models": {name: folder}, "cases": {name: {"model", "actor", "num_micro_batches"}}} and the output folder.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tiny_models import VOCAB_SIZE, make_samples, make_weights

from megagrpo.batching import pack
from megagrpo.config.schema import Config
from megagrpo.hf_mapping.families import mapping_for
from megagrpo.hf_mapping.folder import load_hf_weights, read_config
from megagrpo.hf_mapping.stream import WeightStream
from megagrpo.logprobs import vocab_parallel_logprobs
from megagrpo.mcore.cpu import prepare_cpu
from megagrpo.mcore.model import build_model, wrap_ddp
from megagrpo.mcore.parallel import init_distributed, init_model_parallel
from megagrpo.mcore.pipeline import forward_backward
from megagrpo.optimizer import build_optimizer, build_scheduler, optimizer_step


def run_case(folder, config, num_micro_batches, device):
    parallel = init_model_parallel(config, device)
    hf = read_config(folder)
    mapping = mapping_for(hf)
    chunks = build_model(hf, config, parallel)
    load_hf_weights(chunks, folder, mapping, tensor=(parallel.tp_rank, parallel.tp_size), expert_tensor=(parallel.etp_rank, parallel.etp_size))
    ddp = wrap_ddp(chunks, config)
    optimizer = build_optimizer(config, ddp)

    samples, weights = make_samples(), make_weights()
    bins = np.array_split(np.arange(len(samples)), num_micro_batches * parallel.dp_size)
    pad_to = parallel.tp_size if config.actor.sequence_parallel else 1
    micro_batches = [
        pack(samples, chosen, np.ones(len(samples)), weights, pad_to_multiple_of=pad_to, device=device)
        for chosen in bins[parallel.dp_rank :: parallel.dp_size]
    ]

    def loss(logits, micro_batch, index):
        logprobs, _ = vocab_parallel_logprobs(
            logits, micro_batch.target_ids, tp_group=parallel.tp_group, vocab_size=VOCAB_SIZE, temperature=1.0, with_entropy=False
        )
        parts = [torch.empty_like(logits) for _ in range(parallel.tp_size)]
        dist.all_gather(parts, logits.detach(), group=parallel.tp_group)
        weighted = torch.where(micro_batch.mask, micro_batch.weights * -logprobs, 0.0)
        return weighted.sum(), {"index": torch.tensor(index), "logits": torch.cat(parts, dim=1)[:, :VOCAB_SIZE]}

    for chunk in ddp:
        chunk.zero_grad_buffer()
    forward_only = forward_backward(ddp, micro_batches, loss_function=loss, parallel=parallel, forward_only=True)
    results = forward_backward(ddp, micro_batches, loss_function=loss, parallel=parallel, forward_only=False)
    assert len(results) == len(forward_only) == (num_micro_batches if parallel.is_last_stage else 0)
    for i, (a, b) in enumerate(zip(results, forward_only, strict=True)):
        assert a["index"] == i and torch.equal(a["logits"], b["logits"]), f"micro-batch {i}: results out of order or not repeatable"

    logits = {}
    for micro_batch, result in zip(micro_batches, results, strict=False):  # no results off the last stage
        starts = micro_batch.cu_seqlens.tolist()
        for sample_id, start, end in zip(micro_batch.sample_ids, starts, starts[1:], strict=False):  # the last may be padding
            logits[sample_id] = result["logits"][start:end].clone()
    gradients = {p: p.main_grad.clone() for chunk in chunks for p in chunk.parameters()}
    grad_norm = optimizer_step(optimizer, build_scheduler(config, optimizer, 1)).grad_norm
    # with the distributed optimizer a rank has the sum over data-parallel ranks for its own part only
    gradients = None if config.actor.use_distributed_optimizer else hf_gradients(chunks, gradients, mapping, parallel)
    return parallel, {"logits": logits, "gradients": gradients, "grad_norm": grad_norm}


def hf_gradients(chunks, gradients, mapping, parallel):
    """Full gradients by Hugging Face name: they are laid out as the weights are, so they travel as weights."""
    for parameter, gradient in gradients.items():
        parameter.data.copy_(gradient)
    stream = WeightStream(chunks, mapping, tensor_rank=parallel.tp_rank, expert_tensor_rank=parallel.etp_rank, device=parallel.device)
    return {name: tensor.clone() for bucket in stream.buckets(2**20) for name, tensor in bucket}


def main():
    from megatron.core import parallel_state

    plan, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    device = init_distributed(Config())
    if device.type == "cpu":
        prepare_cpu()
    for name, case in plan["cases"].items():
        config = Config.model_validate({"model": {"dtype": "float32"}, "actor": case["actor"]})
        parallel, result = run_case(plan["models"][case["model"]], config, case["num_micro_batches"], device)
        if parallel.reports_loss:
            torch.save(result, out / f"{name}.{parallel.dp_rank}.pt")
        dist.barrier()
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
