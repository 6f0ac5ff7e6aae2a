"""Log-probabilities and entropy against torch's log_softmax, on one rank (tests/distributed splits the vocabulary)."""

import pytest
import torch

from megagrpo import logprobs as module
from megagrpo.logprobs import vocab_parallel_logprobs


def make_inputs(num_tokens=13, num_columns=11, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_tokens, num_columns, generator=generator, dtype=torch.float64).mul(3).to(dtype)
    return logits.requires_grad_(), torch.randint(0, num_columns, (num_tokens,), generator=generator)


def expected(logits, target_ids, temperature):
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(1, target_ids[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def compute(logits, target_ids, *, vocab_size, temperature=1.0, with_entropy=True):
    return vocab_parallel_logprobs(
        logits, target_ids, tp_group=None, vocab_size=vocab_size, temperature=temperature, with_entropy=with_entropy
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
def test_values_and_gradients(dtype, tolerance, temperature):
    logits, target_ids = make_inputs(dtype=dtype)
    logprobs, entropy = compute(logits, target_ids, vocab_size=11, temperature=temperature)
    assert logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted_logprobs, wanted_entropy = expected(logits, target_ids, temperature)
    torch.testing.assert_close(logprobs.double(), wanted_logprobs, rtol=0, atol=tolerance)
    torch.testing.assert_close(entropy.double(), wanted_entropy, rtol=0, atol=tolerance)

    upstream = torch.randn(2, len(target_ids), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (grad,) = torch.autograd.grad((logprobs * upstream[0] + entropy * upstream[1]).sum(), logits)
    (wanted,) = torch.autograd.grad((wanted_logprobs * upstream[0] + wanted_entropy * upstream[1]).sum(), logits)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad, wanted, rtol=2**-8 if dtype == torch.bfloat16 else 0, atol=max(tolerance, torch.finfo(dtype).eps))


@pytest.mark.parametrize("with_entropy", [True, False])
def test_gradcheck(with_entropy):
    logits, target_ids = make_inputs(num_tokens=4)

    def function(logits):
        results = compute(logits, target_ids % 9, vocab_size=9, temperature=0.7, with_entropy=with_entropy)
        return results if with_entropy else results[0]

    assert torch.autograd.gradcheck(function, logits)


def test_an_entropy_that_is_only_reported_does_not_change_the_gradient():
    logits, target_ids = make_inputs()
    with_entropy, without = (compute(logits, target_ids, vocab_size=11, with_entropy=flag) for flag in (True, False))
    assert without[1] is None
    assert torch.equal(with_entropy[0], without[0])
    grads = [torch.autograd.grad(logprobs.sum(), logits)[0] for logprobs, _ in (with_entropy, without)]
    assert torch.equal(*grads)


def test_padded_columns_have_no_probability_and_no_gradient():
    logits, target_ids = make_inputs()
    target_ids = target_ids % 7
    with torch.no_grad():
        logits[:, 7:] = 50.0  # would win every softmax
    logprobs, entropy = compute(logits, target_ids, vocab_size=7)
    wanted_logprobs, wanted_entropy = expected(logits[:, :7], target_ids, 1.0)
    torch.testing.assert_close(logprobs, wanted_logprobs)
    torch.testing.assert_close(entropy, wanted_entropy)
    (grad,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), logits)
    assert not grad[:, 7:].any()
    assert grad[:, :7].any()


def test_large_logits_neither_overflow_nor_lose_the_target():
    logits = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    logprobs, entropy = compute(logits, torch.tensor([0]), vocab_size=3)
    assert logprobs.item() == 0
    assert entropy.item() == 0
    assert torch.autograd.grad(logprobs.sum(), logits)[0].abs().max() == 0


def test_the_result_does_not_depend_on_the_chunk(monkeypatch):
    logits, target_ids = make_inputs(num_tokens=7)

    def run():
        logprobs, entropy = compute(logits, target_ids, vocab_size=11, temperature=0.9)
        return logprobs, entropy, torch.autograd.grad(logprobs.sum() + entropy.square().sum(), logits)[0]

    whole = run()
    for chunk_bytes in (1, 2 * 11 * 8, 5 * 11 * 8):  # 1, 2 and 5 rows of 7
        monkeypatch.setattr(module, "_CHUNK_BYTES", chunk_bytes)
        assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))


def test_logits_are_left_as_they_were():
    logits, target_ids = make_inputs(dtype=torch.float32)
    before = logits.detach().clone()
    logprobs, entropy = compute(logits, target_ids, vocab_size=11, temperature=0.5)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(logits, before)
