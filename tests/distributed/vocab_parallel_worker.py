"""One rank of test_vocab_parallel.py: compares its share of the vocabulary with the whole. Argument: the unpadded vocabulary size."""

import sys

import torch
import torch.distributed as dist

from megagrpo.logprobs import vocab_parallel_logprobs

NUM_TOKENS, TEMPERATURE = 17, 0.8


def main():
    vocab_size = int(sys.argv[1])
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_columns = -(-vocab_size // num_ranks)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(NUM_TOKENS, num_columns * num_ranks, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    target_ids = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
    upstream = torch.randn(2, NUM_TOKENS, generator=generator, dtype=torch.float64)
    shard = whole.detach()[:, rank * num_columns : (rank + 1) * num_columns].clone().requires_grad_()

    log_p = (whole[:, :vocab_size] / TEMPERATURE).log_softmax(-1)
    wanted_logprobs = log_p.gather(1, target_ids[:, None]).squeeze(1)
    wanted_entropy = -(log_p.exp() * log_p).sum(-1)
    (wanted_grad,) = torch.autograd.grad((wanted_logprobs * upstream[0] + wanted_entropy * upstream[1]).sum(), whole)

    logprobs, entropy = vocab_parallel_logprobs(
        shard, target_ids, tp_group=dist.group.WORLD, vocab_size=vocab_size, temperature=TEMPERATURE, with_entropy=True
    )
    (grad,) = torch.autograd.grad((logprobs * upstream[0] + entropy * upstream[1]).sum(), shard)
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, wanted_grad[:, rank * num_columns : (rank + 1) * num_columns], rtol=0, atol=1e-12)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
