"""The decoder: llama, mistral, qwen2 and qwen3 as one loop over fused weights.

Owns prefill, extend and decode on a KVCache; not files (weights.py), not policies, not sampling.
Hugging Face's models are the oracle of the tests and never run here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from longread_kernels import dispatch as ops
from torch import Tensor

from longread.attention import Attention, FullAttention
from longread.cache import KVCache
from longread.captured import CapturedSteps
from longread.device import choose_device, choose_dtype
from longread.errors import ContextError, ModelError
from longread.matrix import Matrix
from longread.network import Network
from longread.packed import WHOLE, load_packed
from longread.past_window import Reading, SelectedAttention, widened
from longread.policies import Policy
from longread.rope import stretched
from longread.trace import Trace
from longread.weights import ModelConfig, load_config, load_weights

_CHUNK_TOKENS = {"cpu": 2048, "cuda": 4096}
_MOMENT_STRIDE = 4  # a quarter of the queries is enough for a D x D second moment


class Decoder:
    """A model on a device. All methods run without gradients."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        *,
        past_window: Reading | None = None,
        packed: Mapping[str, Matrix] | None = None,
    ) -> None:
        """past_window: read by selection, any number of rows. packed: as Network's."""
        self.trained_window = config.window
        if past_window is not None:
            config = widened(config)
        self.config = config
        self.device = device
        self.dtype = dtype
        self.network = Network(config, weights, device, dtype, packed)
        self._attention: Attention = (
            FullAttention(self.network)
            if past_window is None
            else SelectedAttention(self.network, past_window)
        )
        self.captured = CapturedSteps(self.network)

    @classmethod
    def load(
        cls,
        model_dir: Path,
        device: str,
        dtype: str,
        *,
        past_window: Reading | None = None,
        stretch: int = 1,
        weights: str = WHOLE,
    ) -> Decoder:
        """Load a converted model. device: auto, cpu or cuda[:n]; dtype: auto, bfloat16, float32.

        stretch: how many times longer YaRN makes its window. weights: of packed.choose_weights.
        Raises ModelError where the device is missing or the dtype is not one of these.
        """
        torch_device = choose_device(device)
        torch_dtype = choose_dtype(dtype)
        tensors = load_weights(model_dir, device=str(torch_device), dtype=torch_dtype)
        packed = load_packed(model_dir, weights) if weights != WHOLE else None
        config = load_config(model_dir)
        if stretch > 1:
            config, tensors["inv_freq"] = stretched(config, stretch)
        return cls(
            config, tensors, torch_device, torch_dtype, past_window=past_window, packed=packed
        )

    @property
    def is_past_window(self) -> bool:
        """Whether rows are read as past_window.py does."""
        return self.config.window != self.trained_window

    @property
    def attention(self) -> Attention:
        """How tokens attend to the rows of a cache."""
        return self._attention

    @property
    def most_of_share(self) -> int | None:
        """Rows that a budget given as a share is at most; None where there is no such limit."""
        return self._attention.most_of_share

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens that are read as one where rows depend on it: a reading begins at a multiple."""
        return self._attention.chunk_tokens

    @property
    def kv_layout(self) -> str:
        """What its caches hold, for the key of a store entry."""
        return self._attention.kv_layout

    def new_cache(self, num_rows: int) -> KVCache:
        """An empty cache with room for `num_rows` rows."""
        config = self.config
        return KVCache(
            config.num_hidden_layers,
            config.num_key_value_heads,
            config.head_dim,
            num_rows,
            device=self.device,
            dtype=self.dtype,
        )

    def new_trace(self, num_rows: int, *, keep_steps: bool = False) -> Trace:
        """A trace of what an answer attends to among the first `num_rows` rows."""
        config = self.config
        shape = config.num_hidden_layers, config.num_key_value_heads, num_rows
        return Trace(*shape, device=self.device, keep_steps=keep_steps)

    @torch.inference_mode()
    def prefill(
        self, token_ids: Tensor, cache: KVCache, on_layer: Callable[[int], None] | None = None
    ) -> None:
        """Read document tokens with dense attention, in chunks, without logits.

        token_ids: [T] int64. Adds the queries' second moments to the cache. on_layer is called
        after each layer with the rows read so far, a chunk counting by the share of its layers.
        Raises ModelError where damaged weights make rows that are no numbers.
        """
        self._check_window(cache.length + token_ids.shape[0])
        for chunk in self._chunks(token_ids, cache.length):
            normed = self._read(chunk, cache, None, None, on_layer)
            self.check_finite(normed)  # each row attends to itself, so this covers keys and values

    @torch.inference_mode()
    def extend(
        self, token_ids: Tensor, cache: KVCache, policy: Policy, trace: Trace | None = None
    ) -> Tensor:
        """Read a question with dense attention to every row that the policy has not evicted.

        Returns the logits [V] fp32 of its last token.
        """
        self._check_window(cache.length + token_ids.shape[0])
        normed = torch.empty(0)
        chunks = self._chunks(token_ids, cache.length)
        for chunk_idx, chunk in enumerate(chunks):
            last = chunk_idx == len(chunks) - 1
            normed = self._read(chunk, cache, policy, trace if last else None, None)
        return self._logits(normed[-1:])[0]

    @torch.inference_mode()
    def all_logits(self, token_ids: Tensor, cache: KVCache, policy: Policy) -> Tensor:
        """Read tokens as a question, through packed weights where there are some, be it slower.

        Returns the logits [T, V] fp32 of all of them.
        """
        self._check_window(cache.length + token_ids.shape[0])
        num_rows = token_ids.shape[0]
        return self._logits(self._read(token_ids, cache, policy, None, None, num_rows), num_rows)

    @torch.inference_mode()
    def decode(
        self, token_id: Tensor, cache: KVCache, policy: Policy, trace: Trace | None = None
    ) -> Tensor:
        """Append one token ([1] int64), attend as the policy selects; logits [V] fp32.

        On a GPU the logits lie in a buffer that the next step writes to.
        """
        end = cache.length + 1
        self._check_window(end)
        self._reserve(cache, end)
        can_capture = self._attention.captured
        graph = self.captured.step(cache, policy, trace) if can_capture else None
        if graph is not None:
            with self.on_device():
                logits = graph.step(token_id, policy.kernel_turn(), trace)
                read = policy.read_from(cache)
                if read is not cache:  # others see the row too
                    cache.copy_rows(read, end - 1, end)
            cache.length = end
            return logits
        return self.decode_with_torch(token_id, cache, policy, trace)

    @torch.inference_mode()
    def decode_with_torch(
        self, token_id: Tensor, cache: KVCache, policy: Policy, trace: Trace | None = None
    ) -> Tensor:
        """`decode` in torch operations on any device, which the kernels are compared with."""
        start, end = cache.length, cache.length + 1
        self._check_window(end)
        self._reserve(cache, end)
        with self.on_device():
            if trace is not None:
                trace.start_step(end)
            cos, sin = self._attention.rope(start, end)
            hidden, normed = self.network.embedded(token_id)
            for layer_idx in range(self.config.num_hidden_layers):
                q = self.network.queries(layer_idx, normed, cos, sin, cache)
                policy.appended(layer_idx, start, end)
                attended = self._attention.step(q[0], cache, layer_idx, end, policy, trace)
                hidden, normed = self.network.finish(layer_idx, hidden, attended[None])
            cache.length = end
            return self._logits(normed)[0]

    def on_device(self) -> AbstractContextManager[object]:
        """Triton and CUDA graphs work on the current device, not on that of their tensors."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def _reserve(self, cache: KVCache, num_rows: int) -> None:
        """Make room in the cache; a graph holds on to the slabs that it was captured for."""
        if num_rows > cache.capacity:
            self.captured.clear()
        cache.reserve(num_rows)

    def slow_because(self) -> str | None:
        """Why a GPU's kernels cannot be used on it, or None where they can and on the CPU."""
        if self.device.type != "cuda":
            return None
        return ops.triton_missing(self.device.index or 0)

    def check_finite(self, computed: Tensor) -> None:
        """Raise ModelError where what the model computed is no number. Waits for the device."""
        if not computed.isfinite().all():
            raise ModelError(
                f"{self.config.name} computes what is no number: its files are damaged; "
                f"run `longread models rm {self.config.name}` and try again"
            )

    def _chunks(self, token_ids: Tensor, start: int) -> list[Tensor]:
        """The tokens of rows from `start` on, cut at multiples of a chunk's size."""
        size = self._attention.chunk_tokens or _CHUNK_TOKENS[self.device.type]
        first = size - start % size
        return [part for part in (token_ids[:first], *token_ids[first:].split(size)) if len(part)]

    def _read(
        self,
        token_ids: Tensor,
        cache: KVCache,
        policy: Policy | None,
        trace: Trace | None,
        on_layer: Callable[[int], None] | None,
        most_packed: int | None = None,
    ) -> Tensor:
        """most_packed: as in Layer.times; a document's rows never depend on the packed weights."""
        if policy is None:
            most_packed = 0
        with self.on_device():
            start = cache.length
            end = start + token_ids.shape[0]
            self._reserve(cache, end)
            cos, sin = self._attention.rope(start, end)
            hidden, normed = self.network.embedded(token_ids)
            for layer_idx in range(self.config.num_hidden_layers):
                q = self.network.queries(layer_idx, normed, cos, sin, cache, most_packed)
                scored = self._attention.scored(q)
                if policy is None:
                    cache.add_moment(layer_idx, self._second_moment(scored))
                else:
                    policy.observe(layer_idx, scored, start)
                    policy.appended(layer_idx, start, end)
                attended = self._attention.read(q, cache, layer_idx, start, policy, trace)
                hidden, normed = self.network.finish(layer_idx, hidden, attended, most_packed)
                if on_layer is not None:
                    on_layer(start + (end - start) * (layer_idx + 1) // len(self.network.layers))
        cache.length = end
        return normed

    def _logits(self, normed: Tensor, most_packed: int | None = None) -> Tensor:
        return self.network.logits(normed, most_packed)

    def _second_moment(self, q: Tensor) -> Tensor:
        """Sum of q q^T for each KV head. q: [T, H_q, D]; returns [H_kv, D, D] fp32."""
        num_kv_heads, head_dim = self.config.num_key_value_heads, self.config.head_dim
        sampled = q[::_MOMENT_STRIDE].transpose(0, 1)  # [H_q, n, D]
        sampled = sampled.reshape(num_kv_heads, -1, head_dim)
        return torch.matmul(sampled.transpose(1, 2), sampled).float()

    def _check_window(self, num_rows: int) -> None:
        if num_rows > self.config.window:
            raise ContextError(
                f"{num_rows:,} tokens do not fit the window of {self.config.name}, "
                f"which is {self.config.window:,} tokens"
            )
