"""Greedy generation with a causal language model, after transformers' text-generation example.

The weights are random (made from a config), so that nothing has to be fetched.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=args.length, do_sample=False
    )
    print(tokens[0, prompt.shape[1] :].tolist())


if __name__ == "__main__":
    main()
