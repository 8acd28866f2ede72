"""The least time that a model's arithmetic and memory traffic take on this machine, measured; for scripts/benchmarks/roofline.py."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scripts.benchmarks.roofline import Load

BANDWIDTH_BYTES = 1 << 28
"""Of each of the three tensors with which bytes a second are measured: more than any cache holds."""
OPTIMIZER_BYTES = 34
"""A parameter's: gradient (float32) read for the norm; gradient, master, moments read, the last three written (AdamW); bfloat16 written."""


@dataclass(frozen=True)
class Matrix:
    """A weight of the model that tokens are multiplied with."""

    shape: tuple[int, ...]
    """[out, in], or [experts, out, in]."""
    times: int
    """With how many experts a token is multiplied; 1 for a plain matrix."""


@dataclass(frozen=True)
class Shapes:
    """What the floors need to know of a model."""

    layers: list[Matrix]
    head: Matrix
    num_parameters: int
    attention_operations: int
    """Forward, for each key that a token sees, all layers together."""
    kv_values: int
    """Keys and values of a token, all layers together."""


def read_shapes(folder: str) -> Shapes:
    """From the model's own modules, without its weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from rl.trainer.measure.performance import layer_matrices, work_of

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text, work = config.get_text_config(), work_of(model)
    matrices = [(weight.shape, used) for weight, used in layer_matrices(model) if min(weight.shape[-2:]) > 1]
    layers = [Matrix(tuple(shape), used // shape[-2:].numel()) for shape, used in matrices]
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    num_attention = sum(work.windows.values())
    return Shapes(
        layers=layers,
        head=Matrix(tuple(model.get_output_embeddings().weight.shape), 1),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        attention_operations=work.per_key // 3 * num_attention,
        kv_values=2 * kv_heads * head_dim * num_attention,
    )


class Floors:
    """Measures products and memory on one device."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device, rounds: int):
        self.shapes, self.dtype, self.device, self.rounds = shapes, dtype, device, rounds
        self.weights = [(self.filled(matrix.shape), matrix.times) for matrix in shapes.layers]
        self.head = self.filled(shapes.head.shape)

    def filled(self, shape: Iterable[int]) -> Tensor:
        return torch.randn(tuple(shape), device=self.device, dtype=self.dtype)

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of the fastest round, after one to warm up."""
        took = []
        for _ in range(self.rounds + 1):
            began = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            took.append(time.perf_counter() - began)
        return min(took[1:])

    def products(self, tokens: int, predictors: int, backward: bool = False) -> float:
        """Seconds of all products of a pass over `tokens`, the head's over `predictors`: on CPUs by all threads or by one, whichever is
        faster, for the last of several threads is waited for at each of them."""
        pairs = [(weight, *self.operands(weight, tokens, times)) for weight, times in self.weights]
        pairs.append((self.head, *self.operands(self.head, predictors, 1)))

        def work() -> None:
            for weight, x, gradient in pairs:
                if weight.ndim == 2:
                    torch.nn.functional.linear(x, weight)
                    if backward:
                        torch.mm(gradient, weight)
                        torch.mm(gradient.T, x)
                else:
                    torch.bmm(x, weight.transpose(1, 2))
                    if backward:
                        torch.bmm(gradient, weight)
                        torch.bmm(gradient.transpose(1, 2), x)

        with torch.no_grad():
            together, num_threads = self.seconds(work), torch.get_num_threads()
            if self.device.type != "cpu" or num_threads == 1:
                return together
            torch.set_num_threads(1)
            alone = self.seconds(work)
            torch.set_num_threads(num_threads)
            return min(alone, together)

    def operands(self, weight: Tensor, tokens: int, times: int) -> tuple[Tensor, Tensor]:
        """A product's input and the gradient of its output; tokens are spread evenly over experts."""
        *experts, wide, narrow = weight.shape
        rows = -(-tokens * times // experts[0]) if experts else tokens
        return self.filled((*experts, rows, narrow)), self.filled((*experts, rows, wide))

    def bytes_per_s(self) -> float:
        """Of an addition: two tensors read, one written."""
        a, b, out = (torch.empty(BANDWIDTH_BYTES // 4, device=self.device) for _ in range(3))
        a.fill_(1.0), b.fill_(2.0)
        return 3 * BANDWIDTH_BYTES / self.seconds(lambda: torch.add(a, b, out=out))

    def attention(self, keys: int, products_s: float, operations: float) -> float:
        """Seconds of attention over so many keys, at the rate of products that took `products_s` for `operations`."""
        return keys * self.shapes.attention_operations * products_s / operations

    def prefill(self, load: "Load") -> float:
        """Every prompt once, and a token of each rollout."""
        tokens = load.prompts * load.prompt
        products = self.products(tokens, load.rollouts)
        keys = tokens * (load.prompt + 1) // 2
        return products + self.attention(keys, products, self.operations(tokens, load.rollouts))

    def decode_step(self, load: "Load") -> float:
        """A token of each rollout; the keys and values of all of them come from memory once."""
        kept = load.rollouts * (load.prompt + load.new // 2) * self.shapes.kv_values * self.head.element_size()
        return self.products(load.rollouts, load.rollouts) + kept / self.bytes_per_s()

    def training(self, load: "Load", computed: int) -> float:
        """Forward and backward of `computed` tokens, with the head at those that predict an answer's."""
        predictors = load.rollouts * load.new
        products = self.products(computed, predictors, backward=True)
        keys = computed * (load.prompt + load.new) // 2
        return products + self.attention(3 * keys, products, 3 * self.operations(computed, predictors))

    def operations(self, tokens: int, predictors: int) -> float:
        """Of the forward pass's products."""
        layers = sum(times * matrix.shape[-1] * matrix.shape[-2] for matrix in self.shapes.layers for times in [matrix.times])
        return 2.0 * (tokens * layers + predictors * self.shapes.head.shape[0] * self.shapes.head.shape[1])


def measure_floors(folder: str, load: "Load", computed: int, dtype: str, gpu: bool, rounds: int) -> dict[str, float]:
    """Seconds by phase."""
    device = torch.device("cuda" if gpu else "cpu")
    floors = Floors(read_shapes(folder), getattr(torch, dtype), device, rounds)
    rate = floors.bytes_per_s()
    return {
        "prefill": floors.prefill(load),
        "decode step": floors.decode_step(load),
        "forward and backward": floors.training(load, computed),
        "optimizer": OPTIMIZER_BYTES * floors.shapes.num_parameters / rate,
        "publish": 2 * floors.shapes.num_parameters * floors.head.element_size() / rate,
        "gigabytes a second": rate / 1e9,
    }
