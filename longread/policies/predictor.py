"""The predictor of TokenButler (arXiv 2503.07518): its parts, its size, and its file.

A producer layer's queries give small queries for the heads of the layers that follow it, each KV
head's keys are projected to as many numbers, and their product ranks the rows as attention would.
Layer 0 serves itself alone, since what it sees is the token and nothing else; each later producer
serves its own layer and the next three.

Differences from the paper: what goes in are the layer's queries in place of its hidden state, of
which they are a linear image with about as many numbers, and keys are projected from cached keys;
so it is told all that it needs by what a policy sees, and a cache can be projected at any time.
Both are as they were before RoPE, and are first centred and scaled in fp32, queries by channel and
keys by head: some models add numbers to both that are far larger than what varies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from longread_kernels import dispatch as ops
from torch import Tensor, nn

from longread.errors import ModelError, UsageError
from longread.model_config import ModelConfig

DIM = 16  # numbers of a small query or key
_MOST_WIDTH = 512
_WIDTH_STEP = 8
_GROUP_LAYERS = 4
_LEAST_SPREAD = 1e-3
_FORMAT = "longread-butler 1"
_TRAIN = "`longread butler train TEXTS --model NAME --out FILE` makes one"


@dataclass(frozen=True)
class Shape:
    """Of the model's attention."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig) -> Shape:
        return cls(
            config.num_hidden_layers,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )

    @property
    def groups(self) -> list[range]:
        """The layers that each producer serves, itself the first of them."""
        starts = [0, *range(1, self.num_layers, _GROUP_LAYERS), self.num_layers]
        return [range(start, end) for start, end in zip(starts, starts[1:], strict=False)]


@dataclass(frozen=True)
class Origin:
    """What a predictor was made for and from. recall: of each layer, the share of the attention to
    rows that are not kept anyway which the tenth of them holds that is chosen; best: that a tenth
    can hold.
    """

    model: str
    identity: str  # of the model's weights
    texts: str = ""
    seed: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    recall: tuple[float, ...] = ()
    best: tuple[float, ...] = ()


class _Producer(nn.Module):
    def __init__(self, num_inputs: int, width: int, num_outputs: int) -> None:
        super().__init__()
        self.mean: Tensor = nn.Buffer(torch.zeros(num_inputs))
        self.scale: Tensor = nn.Buffer(torch.ones(num_inputs))
        self.norm = nn.LayerNorm(num_inputs)
        self.inner = nn.Linear(num_inputs, width, bias=False)
        self.outer = nn.Linear(width, num_outputs, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        scaled = self.norm((inputs.float() - self.mean) * self.scale)
        return self.outer(F.silu(self.inner(scaled.to(self.inner.weight.dtype))))


class Predictor(nn.Module):
    """Small queries and keys for every layer of a model."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.shape, self.width = shape, width
        num_inputs = shape.num_heads * shape.head_dim
        self.producers = nn.ModuleList(
            _Producer(num_inputs, width, len(group) * shape.num_heads * DIM)
            for group in shape.groups
        )
        keys = torch.randn(shape.num_layers, shape.num_kv_heads, shape.head_dim, DIM)
        self.key_mean: Tensor = nn.Buffer(torch.zeros(keys.shape[:3]))
        self.key_scale: Tensor = nn.Buffer(torch.ones(keys.shape[:2]))
        self.keys = nn.Parameter(torch.linalg.qr(keys).Q)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def small_queries(self, producer: int, q: Tensor) -> Tensor:
        """Of the layers that a producer serves, [n, T, H_q, d'], scaled.

        q: its queries before RoPE, [T, H_q, D].
        """
        found = self.producers[producer](q.flatten(1)) * DIM**-0.5
        shape = self.shape
        return found.view(q.shape[0], -1, shape.num_heads, DIM).transpose(0, 1)

    def small_keys(self, layer_idx: int, k: Tensor) -> Tensor:
        """[H_kv, S, d'] fp32. k: keys before RoPE, [H_kv, S, D]."""
        centred = k.float() - self.key_mean[layer_idx][:, None]
        return torch.matmul(
            centred, self.key_scale[layer_idx][:, None, None] * self.keys[layer_idx]
        )

    @torch.no_grad()
    def scale_queries(self, producer: int, q: Tensor) -> None:
        """Learn their spread from examples. q: as small_queries has it."""
        own = self.producers[producer]
        assert isinstance(own, _Producer)
        own.mean.copy_(q.flatten(1).mean(dim=0))
        own.scale.copy_(1 / q.flatten(1).std(dim=0).clamp(min=_LEAST_SPREAD))

    @torch.no_grad()
    def scale_keys(self, layer_idx: int, k: Tensor) -> None:
        """Learn their spread from examples. k: as small_keys has it."""
        self.key_mean[layer_idx] = k.mean(dim=1)
        spread = k.var(dim=1).mean(dim=1).sqrt()
        self.key_scale[layer_idx] = 1 / spread.clamp(min=_LEAST_SPREAD)

    def used_on(self, device: torch.device, dtype: torch.dtype) -> Predictor:
        """Itself, moved, its larger matrices in `dtype`."""
        self.to(device)
        for producer in self.producers:
            assert isinstance(producer, _Producer)
            producer.inner.to(dtype)
            producer.outer.to(dtype)
        return self


def unturned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys as they were before RoPE. rows: [T, H, D]; cos, sin: [T, D/2] fp32."""
    squared = cos.square() + sin.square()  # YaRN also scales what it turns
    return ops.rope(rows, cos / squared, -sin / squared)


def fitting_width(shape: Shape, num_parameters: int) -> int:
    """The widest inner layer, up to 512, with which a predictor has under one percent of a model's
    parameters; 8 at least.
    """
    num_inputs = shape.num_heads * shape.head_dim
    num_producers = len(shape.groups)
    fixed = 2 * num_producers * num_inputs
    fixed += shape.num_layers * shape.num_kv_heads * shape.head_dim * DIM
    a_unit = num_producers * num_inputs + shape.num_layers * shape.num_heads * DIM
    fitting = (num_parameters // 100 - 1 - fixed) // a_unit
    return max(_WIDTH_STEP, min(_MOST_WIDTH, fitting // _WIDTH_STEP * _WIDTH_STEP))


def to_bytes(predictor: Predictor, origin: Origin) -> bytes:
    """One safetensors file, matrices in half precision."""
    from safetensors.torch import save

    tensors = predictor.state_dict()
    for name, _ in predictor.named_parameters():
        tensors[name] = tensors[name].half()
    about = {"format": _FORMAT, "width": str(predictor.width)}
    about |= {"shape": json.dumps(asdict(predictor.shape)), "origin": json.dumps(asdict(origin))}
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, about)


def load(path: Path) -> tuple[Predictor, Origin]:
    """A predictor on the CPU in fp32. Raises UsageError where there is no such file, or another."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about: Mapping[str, str] = file.metadata() or {}
            if about.get("format") != _FORMAT:
                raise UsageError(f"{path} holds no predictor of this version; {_TRAIN}")
            origin = json.loads(about["origin"])
            lists = {name: tuple(value) for name, value in origin.items() if type(value) is list}
            predictor = Predictor(Shape(**json.loads(about["shape"])), int(about["width"]))
            predictor.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})
            return predictor.requires_grad_(False), Origin(**(origin | lists))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"the predictor {path} cannot be read: {reason}; {_TRAIN}") from error
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"{path} holds no predictor ({error}); {_TRAIN}") from error


def shipped_path(model: str) -> Path:
    """Where the predictor of a model of this name would lie in the package."""
    return Path(__file__).parent.parent / "data" / f"{model}.butler.safetensors"


def load_for(file: str, model: str, identity: str) -> Predictor:
    """The predictor of a file, or with "" the package's own, for the weights of this identity.

    Raises UsageError where the file cannot be read or is another model's, ModelError where there
    is none in the package.
    """
    path = Path(file).expanduser() if file else shipped_path(model)
    if not file and not path.exists():
        raise ModelError(f"there is no predictor for {model}: {_TRAIN}, and --butler FILE reads it")
    predictor, origin = load(path)
    if origin.identity != identity:
        raise UsageError(
            f"the predictor {path} was made for other weights ({origin.model}) than those of "
            f"{model}: {_TRAIN}"
        )
    return predictor
