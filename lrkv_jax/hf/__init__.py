"""Checkpoints of the Hugging Face kind: a folder of config.json, safetensors and tokenizer.json, read and written.

`architecture` and `tensors` say what a Llama, a Qwen2 and a Qwen3 are in our terms; a model that is none of them is
written under our own names, with `page` to explain them. `files` knows safetensors, `__main__` is the command.
"""
