"""Log-probabilities and entropy from a vocabulary split over ranks equal those from the whole one, values and gradients."""

import pytest
from torchrun import run_workers


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 22), (2, 19), (4, 5)], ids=["even", "padded", "ranks-of-padding-only"])
def test_split_vocabulary_equals_the_whole(num_ranks, vocab_size):
    run_workers("vocab_parallel_worker.py", vocab_size, num_processes=num_ranks, timeout_s=120)
