"""What Megatron-Core gets in place of CUDA on CPU. That it suffices, tests/distributed/test_layouts.py shows."""

import pytest
import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack

from megagrpo.mcore.cpu import prepare_cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is replaced where there is a GPU")


@pytest.mark.usefixtures("world_of_one")
def test_preparing_twice_changes_nothing_more():
    before = torch.cuda.current_device, dist.all_gather, dist.all_to_all_single, len(_get_current_function_mode_stack())
    prepare_cpu()
    after = torch.cuda.current_device, dist.all_gather, dist.all_to_all_single, len(_get_current_function_mode_stack())
    assert before == after


@pytest.mark.usefixtures("world_of_one")
def test_cuda_means_cpu():
    tensors = [
        torch.ones(2, device="cuda"),
        torch.ones(2, device=torch.cuda.current_device()),
        torch.ones(2, device=torch.device("cuda", 0)),
    ]
    tensors += [torch.ones(2).cuda(), torch.ones(2).to("cuda"), torch.ones(2).to("cuda:0", torch.float32)]
    assert [tensor.device.type for tensor in tensors] == ["cpu"] * 6
    assert torch.ones(2).type() == "torch.cuda.FloatTensor", "what Megatron's gradient buckets compare with"
    assert torch.ones(2).type(torch.float64).dtype == torch.float64


@pytest.mark.usefixtures("world_of_one")
def test_the_generator_is_that_of_the_cpu():
    torch.cuda.manual_seed(3)
    first = torch.rand(2, device="cuda")
    assert torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_split_sizes_may_be_tensors(world_of_one):
    output = torch.empty(3)
    dist.all_to_all_single(output, torch.arange(3.0), torch.tensor([3]), torch.tensor([3]), group=world_of_one)
    assert output.tolist() == [0, 1, 2]
