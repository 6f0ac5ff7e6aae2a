"""The Megatron-Core side: process groups, model, pipeline, offload, and what CPU needs. Nothing else imports megatron.core
but logprobs.py, optimizer.py and checkpoint.py."""
