"""A small inference engine: static KV cache, padded prefill buckets, batched decode, draft and vision models.

It has no dispatcher of its own and no stand-ins: transformers architectures from config, a cache with one row
per running request, positions of each row its own, and the shapes of every forward fixed by buckets, so that
each model compiles once per bucket. Recording goes through `dt.record`, or through `dt.ModelCapture` as a
model runner integrates it (docs/engine.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

import dispatch_trace as dt

VOCAB = 64


def tiny_llama(*, layers: int = 2, width: int = 32, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, every layer would be next to nothing
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    return model


def tiny_vit(*, seed: int = 2) -> ViTModel:
    torch.manual_seed(seed)
    config = ViTConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        num_channels=3,
    )
    return ViTModel(config, add_pooling_layer=False).eval()


class SlotCache:
    """A static cache: one row per running request, one for padding, and a place for padded tokens.

    Attributes:
      keys, values: [slots + 1, heads, length + 1, dim] by layer.
      rows: [batch] the slot of each row of the step.
      places: [batch, tokens] where its tokens are written: their positions, or `length` for padding.
    """

    def __init__(self, config: LlamaConfig, *, slots: int, length: int) -> None:
        head = config.hidden_size // config.num_attention_heads
        shape = (slots + 1, config.num_key_value_heads, length + 1, head)
        self.length = length
        self.keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self.rows = torch.zeros(1, dtype=torch.long)
        self.places = torch.zeros(1, 1, dtype=torch.long)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, kwargs: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [batch, heads, tokens, dim] and returns [batch, heads, length + 1, dim]."""
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            store[self.rows[:, None], :, self.places] = new.transpose(1, 2)
        return self.keys[layer][self.rows], self.values[layer][self.rows]

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """[batch, 1, tokens, length + 1]: a token sees what stands at its position and before."""
        return torch.arange(self.length + 1) <= positions[:, None, :, None]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(slots=True)
class Request:
    """A prompt on its way.

    Attributes:
      tokens: prompt and what was generated.
      slot: its row of the cache.
      left: how many tokens are still to be generated.
    """

    id: str
    tokens: list[int]
    slot: int
    left: int
    done: bool = False


@dataclass(slots=True)
class Lane:
    """One model of the engine: what is called, its cache, and what records it."""

    model: nn.Module
    call: Callable[..., Any]
    cache: SlotCache | None = None
    capture: Any = None
    recorder: Any = None


@dataclass
class Engine:
    """Runs requests to their end.

    Attributes:
      target, draft, vision: the models; draft proposes `proposals` tokens a step where there is one.
      buckets: sizes to which a prompt is padded.
      batch: rows of a decode step.
      slots: requests at once.
    """

    target: nn.Module
    draft: nn.Module | None = None
    vision: nn.Module | None = None
    buckets: tuple[int, ...] = (8, 16)
    batch: int = 4
    slots: int = 4
    length: int = 32
    proposals: int = 0
    lanes: dict[str, Lane] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, model in (("target", self.target), ("draft", self.draft), ("vision", self.vision)):
            if model is not None:
                config = getattr(model, "config", None)
                cache = None
                if name != "vision":
                    cache = SlotCache(config, slots=self.slots, length=self.length)
                self.lanes[name] = Lane(model, model, cache)

    # Integration: what a model runner does ------------------------------------------------------------

    def attach(self, folder: Path, modules: dict[str, list[str]], **options: Any) -> None:
        """Gives models a capture each: before they compile, into a directory of their own."""
        for name, patterns in modules.items():
            lane = self.lanes[name]
            lane.capture = dt.ModelCapture(lane.model, patterns, folder, subdirectory=name, **options)
            dt.TensorRegistry._instance = lane.capture._registry

    def compile(self, backend: str = "aot_eager") -> None:
        for lane in self.lanes.values():
            lane.call = torch.compile(lane.model, backend=backend, fullgraph=True, dynamic=False)
            if lane.capture is not None:
                lane.capture.register_clear_hook(lane.call)

    def enable(self) -> None:
        """From here on forwards are written."""
        for lane in self.lanes.values():
            if lane.capture is not None:
                lane.capture.enable()

    def close(self) -> None:
        for lane in self.lanes.values():
            if lane.capture is not None:
                lane.capture.close()

    @torch.no_grad()
    def warm_up(self) -> None:
        """Runs every bucket once, so that all is compiled before the first request."""
        for name in ("target", "draft"):
            if name in self.lanes:
                for size in self.buckets:
                    self._text(name, "prefill", [None], [[0] * size], [[0] * size], [0])
                widths = {1, self.proposals + 1} if name == "target" else {1}
                for width in sorted(widths):
                    rows = [[0] * width] * self.batch
                    self._text(name, "decode", [None] * self.batch, rows, rows, [0] * self.batch)
        if "vision" in self.lanes:
            self.encode({"warm-up": torch.zeros(3, 16, 16)}, record=False)

    def record(self, name: str, recorder: Any) -> None:
        """Steps of a model go to a `dt.record` from now on."""
        self.lanes[name].recorder = recorder

    # Requests -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompts: dict[str, Sequence[int]], *, new_tokens: int = 4) -> dict[str, list[int]]:
        """Greedy continuations: each prompt by itself in a bucket, then all of them in one batch."""
        running = [
            Request(id, list(tokens), slot, new_tokens) for slot, (id, tokens) in enumerate(prompts.items())
        ]
        for request in running:
            self._prefill(request)
        while active := [r for r in running if r.left > 0]:
            self._decode(active[: self.batch])
        return {r.id: r.tokens for r in running}

    @torch.no_grad()
    def encode(self, images: dict[str, torch.Tensor], *, record: bool = True) -> torch.Tensor:
        """[requests, patches, width] of images by request, in one padded batch of two rows."""
        pixels = torch.zeros(2, 3, 16, 16)
        for row, image in enumerate(images.values()):
            pixels[row] = image
        lane = self.lanes["vision"]
        ids = [*images, *[None] * (2 - len(images))]
        with self._recorded(lane, "prefill", ids, None, None, record=record):
            out = lane.call(pixel_values=pixels).last_hidden_state
        return out[: len(images)]

    def _prefill(self, request: Request) -> None:
        size = next(b for b in self.buckets if b >= len(request.tokens))
        for name in ("target", "draft"):
            if name not in self.lanes:
                continue
            count = len(request.tokens)
            tokens = [*request.tokens, *[0] * (size - count)]
            positions = [*range(count), *[count - 1] * (size - count)]  # padding repeats the last one
            logits = self._text(name, "prefill", [request.id], [tokens], [positions], [count], [request.slot])
            if name == "target":
                last = int(logits[0, count - 1].argmax())
        request.tokens.append(last)
        request.left -= 1

    def _decode(self, active: list[Request]) -> None:
        proposed = self._propose(active) if self.draft is not None and self.proposals else {}
        width = 1 + (self.proposals if proposed else 0)
        inputs = [[r.tokens[-1], *proposed.get(r.id, [])] for r in active]
        logits = self._decode_step("target", active, inputs, width)
        for row, request in enumerate(active):
            best = logits[row].argmax(-1).tolist()
            for place in range(width):
                if request.left <= 0:
                    break
                request.tokens.append(best[place])
                request.left -= 1
                if place + 1 < width and inputs[row][place + 1] != best[place]:
                    break  # the rest was proposed behind another token

    def _propose(self, active: list[Request]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {r.id: [] for r in active}
        for _ in range(self.proposals):
            inputs = [[(found[r.id] or [r.tokens[-1]])[-1]] for r in active]
            logits = self._decode_step("draft", active, inputs, 1, ahead=len(found[active[0].id]))
            for row, request in enumerate(active):
                found[request.id].append(int(logits[row, 0].argmax()))
        return found

    def _decode_step(
        self, name: str, active: list[Request], inputs: list[list[int]], width: int, *, ahead: int = 0
    ) -> torch.Tensor:
        ids: list[str | None] = [r.id for r in active]
        first = [len(r.tokens) - 1 + ahead for r in active]
        spare = self.batch - len(active)
        tokens = [*inputs, *[[0] * width] * spare]
        positions = [[p + i for i in range(width)] for p in first] + [[0] * width] * spare
        slots = [*[r.slot for r in active], *[self.slots] * spare]
        return self._text(name, "decode", [*ids, *[None] * spare], tokens, positions, None, slots)

    # Forwards -----------------------------------------------------------------------------------------

    def _text(
        self,
        name: str,
        phase: str,
        ids: list[str | None],
        tokens: list[list[int]],
        positions: list[list[int]],
        counts: list[int] | None,
        slots: list[int] | None = None,
    ) -> torch.Tensor:
        lane = self.lanes[name]
        assert lane.cache is not None
        at = torch.tensor(positions)
        places = at.clone()
        for row, count in enumerate(counts or ()):
            places[row, count:] = lane.cache.length
        lane.cache.rows = torch.tensor(slots if slots is not None else [self.slots] * len(tokens))
        lane.cache.places = places
        mask = lane.cache.mask(at)
        with self._recorded(lane, phase, ids, positions, tokens, record=slots is not None):
            out = lane.call(
                input_ids=torch.tensor(tokens),
                position_ids=at,
                attention_mask=mask,
                cache=lane.cache,
                use_cache=True,
            )
        return out.logits

    @contextlib.contextmanager
    def _recorded(
        self,
        lane: Lane,
        phase: str,
        ids: list[str | None],
        positions: list[list[int]] | None,
        tokens: list[list[int]] | None,
        *,
        record: bool,
    ) -> Iterator[None]:
        """Brackets one forward, by whichever recorder the lane has."""
        if lane.capture is not None and record:
            lane.capture.setup_tensor_capture()
            yield
            known = [id for id in ids if id is not None]
            at = torch.tensor(positions if positions is not None else [[0]] * len(ids))
            meta = {} if tokens is None else {"tokens": tokens}
            if phase == "prefill" and len(at) == 1:
                at = at[0]  # as engines hold them: flat, and the batch is one request
            lane.capture.save_tensor_captures(at, phase == "prefill", known, **meta)
        elif lane.recorder is not None and record:
            meta = {"phase": phase, "req_ids": ids}
            if positions is not None:
                meta |= {"positions": positions, "tokens": tokens}
            with lane.recorder.step(**meta):
                yield
        else:
            yield


@torch.no_grad()
def reference(
    model: nn.Module, recorder: Any, prompts: dict[str, Sequence[int]], *, new_tokens: int = 4
) -> dict[str, list[int]]:
    """The trusted run: no padding, no batch, the cache as long as what is in it."""
    from transformers import DynamicCache

    found = {}
    for id, prompt in prompts.items():
        tokens, cache = list(prompt), DynamicCache(config=model.config)
        fed = 0
        for step in range(new_tokens):
            new = tokens[fed:]
            positions = list(range(fed, len(tokens)))
            with recorder.step(
                phase="decode" if step else "prefill", req_ids=[id], positions=[positions], tokens=[new]
            ):
                out = model(
                    input_ids=torch.tensor([new]),
                    position_ids=torch.tensor([positions]),
                    cache=cache,
                    use_cache=True,
                )
            fed = len(tokens)
            tokens.append(int(out.logits[0, -1].argmax()))
        found[id] = tokens
    return found


@torch.no_grad()
def reference_vision(model: nn.Module, recorder: Any, images: dict[str, torch.Tensor]) -> None:
    """One image at a time."""
    for id, image in images.items():
        with recorder.step(phase="prefill", req_ids=[id]):
            model(pixel_values=image[None])
