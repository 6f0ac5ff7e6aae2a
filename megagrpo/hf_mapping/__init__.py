"""Names and layouts of parameters, Megatron <-> Hugging Face."""
