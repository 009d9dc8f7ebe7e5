"""A pipeline of three models, as diffusion pipelines are built: text encoder, transformer, VAE.

    python draw.py [--steps N] [--fault]

`--fault` scales one row of a weight of the VAE by 1.5: a mistake to look for.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Callback = Callable[["Pipeline", int, torch.Tensor, dict[str, torch.Tensor]], dict[str, Any]]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), context, context, need_weights=False)[0]
        return x + self.mlp(x)


class TextEncoder(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, x)
        return x


class Denoiser(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.time = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.leave = nn.Linear(width, 4)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = self.enter(latents) + self.time(timestep)
        for block in self.blocks:
            x = block(x, context)
        return self.leave(x)


class Autoencoder(nn.Module):
    """Its methods are called, never the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 4), nn.Sequential(nn.Linear(4, 16), nn.SiLU())
        self.leave = nn.Linear(16, 12)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.leave(self.decoder(latents / 0.18))


class Scheduler:
    def __init__(self, num_steps: int) -> None:
        self.timesteps = torch.linspace(999, 0, num_steps + 1).long()

    def step(self, velocity: torch.Tensor, index: int, latents: torch.Tensor) -> torch.Tensor:
        return latents - velocity * (self.timesteps[index] - self.timesteps[index + 1]) / 1000


class Pipeline:
    def __init__(self, num_steps: int) -> None:
        self.text_encoder = TextEncoder().eval()
        self.transformer = Denoiser().eval()
        self.vae = Autoencoder().eval()
        self.scheduler = Scheduler(num_steps)

    @torch.no_grad()
    def __call__(
        self,
        prompt: torch.Tensor,
        generator: torch.Generator,
        callback_on_step_end: Callback | None = None,
    ) -> torch.Tensor:
        context = self.text_encoder(prompt)
        latents = torch.randn(1, 6, 4, generator=generator)
        for index, timestep in enumerate(self.scheduler.timesteps[:-1]):
            velocity = self.transformer(latents, timestep[None], context)
            latents = self.scheduler.step(velocity, index, latents)
            if callback_on_step_end is not None:
                latents = callback_on_step_end(self, index, timestep, {"latents": latents})["latents"]
        return self.vae.decode(latents)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fault", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    pipe = Pipeline(args.steps)
    if args.fault:
        with torch.no_grad():
            pipe.vae.decoder[0].weight[3] *= 1.5
    picture = pipe(torch.tensor([[1, 5, 9, 2]]), torch.Generator().manual_seed(1))
    print(f"picture {tuple(picture.shape)}")


if __name__ == "__main__":
    main()
