"""Any Hugging Face causal LM, made to run packed ragged batches over paged KV."""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from shared.engine.attention.batch import AttentionBatch
from shared.engine.attention.layer import LayerAttention
from shared.engine.attention.paged import ATTENTION_NAME, paged_attention
from shared.engine.captures import Captures
from shared.engine.context_limit import context_limit
from shared.engine.cuda.kernels import TritonKernels, has_triton, load_triton
from shared.engine.decoder_layers import decoder_layers, first_layers
from shared.engine.fingerprint import model_fingerprint
from shared.engine.kv_pool import KVShape
from shared.engine.linear import pack_linears
from shared.engine.native.decoder import NativeDecoder
from shared.engine.native.draws import NativeDraws
from shared.engine.native.library import Library, has_kernels, load_library
from shared.engine.packed_llama import PackedLlama
from shared.engine.quantised_weight import QuantisedWeight
from shared.engine.settings import Native, Quantize
from shared.engine.source import cannot_be_loaded, check_source
from shared.sampling.kernels import draw_by
from shared.settings import StartupError

if TYPE_CHECKING:
    from shared.engine.cuda.graphs import StaticBatch

logger = logging.getLogger(__name__)

_PROBE_NAME = "outrider_probe"

AttentionInterface.register(ATTENTION_NAME, paged_attention)


class CausalLM:
    """A loaded model: `forward` runs one packed step of it; the attributes describe it.

    Every linear layer sees one ragged batch `(1, T)`, attention sees each sequence's own blocks: Orca's
    selective batching (Yu et al. 2022), by way of one attention function.
    """

    def __init__(self, model: PreTrainedModel, name: str, native: Native = "off", quantize: Quantize = "none") -> None:
        """`native`: whether kernels of our own are used where there are any. `quantize`: what the weights of its linear
        layers are rounded to, all but the head's."""
        config = model.config.get_text_config()
        self._model: PreTrainedModel = model.eval()  # type: ignore[no-untyped-call]
        self.name = name
        self.device = model.device
        self.dtype = model.dtype
        self.vocab_size: int = config.vocab_size
        self.eos_token_ids = _eos_token_ids(model)
        self.kv_shape, self.attention = _probe_attention(model, name)
        self.num_layers = self.kv_shape.num_layers
        self.hidden_size: int = config.hidden_size
        self._beside = ""
        self.kv_beside: tuple[KVShape, torch.dtype] | None = None
        """What a smaller model keeps of each position that this one has KV of: see `KVPool.beside`."""
        limit = context_limit(config, [layer.sliding_window for layer in self.attention])
        self.max_context = limit.num_tokens
        if limit.reason:
            logger.warning("model %s is served with at most %d tokens of context: %s", name, *limit)
        # Kernels of our own for this device and type, if there are any.
        self.kernels = load_library() if native == "auto" and has_kernels(self.device, self.dtype) else None
        if self.kernels is not None:
            draw_by(NativeDraws(self.kernels))
        self._triton = load_triton() if native == "auto" and has_triton(self.device, self.dtype) else None
        self._packed: PackedLlama | NativeDecoder | None = None
        self._captured_layers: tuple[int, ...] = ()
        self._captures: Captures | None = None
        self.captured: Tensor | None = None
        """What of the latest step was to be captured, `[T, layers, hidden]`."""
        # Bits by layer. The weights are rounded already, and rounded again are the same.
        self._quantised = {} if quantize == "none" else self._quantise(quantize)

    @classmethod
    def load(
        cls,
        source: str,
        device: str = "auto",
        dtype: str = "auto",
        native: Native = "auto",
        quantize: Quantize = "none",
    ) -> CausalLM:
        """Loads from a local folder or by hub name. Raises StartupError with one clear line."""
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        if chosen.type == "cuda" and not torch.cuda.is_available():
            raise StartupError(f"device {device!r} was asked for, but this machine has no CUDA device")
        check_source(source)
        folder = Path(source)
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise StartupError(f"model folder {source} has no config.json")
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, dtype="auto" if dtype == "auto" else getattr(torch, dtype), output_loading_info=True
            )
            model, loading = loaded
            if missing := sorted(loading["missing_keys"]):
                raise ValueError(f"its checkpoint lacks {len(missing)} weights, the first of them {missing[0]}")
            model = model.to(chosen)
        except Exception as error:
            # transformers, safetensors and the hub client share no exception class.
            raise StartupError(f"model {source} {cannot_be_loaded(source, _first_line(error))}") from error
        return cls(model, folder.name if folder.is_dir() else source, native, quantize)

    @property
    def attention_kernels(self) -> Library | TritonKernels | None:
        return self._triton if self.kernels is None else self.kernels

    def leave_triton(self) -> None:
        """Goes on with PyTorch's attention."""
        self._triton = None

    def fuse(self) -> int:
        """Has as many of its layers as can be computed in few launches each, and says how many."""
        from shared.engine.cuda.layers import fuse_layers

        return fuse_layers(self._model, self.attention)

    def unfuse(self) -> None:
        """Has them compute as transformers has it."""
        from shared.engine.cuda.layers import unfuse_layers

        unfuse_layers(self._model)

    def capture(self, layers: Sequence[int]) -> None:
        """Has every step keep what its tokens look like before these layers in `captured`: with the number of layers,
        as the head sees it, behind the last one and its norm. Raises StartupError if they cannot be found."""
        self._captured_layers = tuple(layers)
        self._captures = Captures(decoder_layers(self._model, self.name), layers)

    @torch.inference_mode()
    def embed(self, token_ids: Tensor) -> Tensor:
        """`[T]` to `[T, hidden]`, as the first layer gets them."""
        if self._packed is not None:
            return self._packed.embed(token_ids)
        embedded: Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    @torch.inference_mode()
    def project(self, hidden: Tensor) -> Tensor:
        """What the head makes of `[R, hidden]`, which are behind the last norm: `[R, vocab_size]`, uncapped."""
        if self._packed is not None:
            return self._packed.project(hidden)
        head: Any = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        logits: Tensor = head(hidden)
        return logits

    def first_layers(self, num_layers: int) -> CausalLM:
        """The same model, which is packed by now, without the layers behind the first so many. It draws on the same
        weights, and captures nothing. Raises StartupError if they cannot be found."""
        part = copy.copy(self)
        part._captured_layers, part._captures, part.captured = (), None, None
        if self._packed is not None:
            part._packed = self._packed.first_layers(num_layers)
        else:
            part._model = first_layers(self._model, num_layers, self.name)
        return part

    def forward(self, token_ids: array[int] | Tensor, batch: AttentionBatch, rows: array[int]) -> Tensor:
        """Logits `[R, vocab_size]` at the packed positions `rows` `[R]` of `token_ids` `[T]`, which may be on the
        device.

        Writes the T tokens' KV to the batch's pool.
        """
        if isinstance(self._packed, NativeDecoder):
            assert batch.native is not None
            logits, self.captured = self._packed.forward(token_ids, batch.native, rows, self._captured_layers)
            return logits
        # Without waiting for what the device still computes.
        ids, positions, kept = (
            _tensor(each).to(self.device, non_blocking=True) for each in (token_ids, batch.positions, rows)
        )
        if isinstance(self._packed, PackedLlama):
            return self._packed_forward(self._packed, ids, positions, batch, kept)
        logits, self.captured = self.torch_forward(ids, positions, batch, kept)
        return logits

    @torch.inference_mode()
    def _packed_forward(
        self, packed: PackedLlama, ids: Tensor, positions: Tensor, batch: AttentionBatch, rows: Tensor
    ) -> Tensor:
        logits, self.captured = packed.forward(ids, positions, batch, rows, self._captured_layers)
        return logits

    @torch.inference_mode()
    def torch_forward(
        self, ids: Tensor, positions: Tensor, batch: AttentionBatch | StaticBatch, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """transformers' forward of packed ids and positions `[T]`: logits `[R, vocab_size]` at `rows` `[R]`, and what
        is captured, `[T, layers, hidden]`."""
        logits: Tensor = self._model(
            input_ids=ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
            attention_batch=batch,
        ).logits
        return logits[0], None if self._captures is None else self._captures.take()

    @torch.inference_mode()
    def reference_logits(self, token_ids: Tensor) -> Tensor:
        """The model's own forward, with transformers' eager attention: `[T]` ids to `[T, vocab_size]` logits."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=token_ids.unsqueeze(0), use_cache=False).logits
            return logits[0]
        finally:
            self._model.set_attn_implementation(ATTENTION_NAME)

    def extend_kv(self, num_layers: int, fingerprint: str) -> None:
        """Has blocks hold so many layers of KV more, behind the model's own, of what is known by that fingerprint."""
        self.kv_shape = self.kv_shape._replace(num_layers=self.num_layers + num_layers)
        self._beside = fingerprint

    @property
    def weight_bytes(self) -> int:
        """Of its weights, as they were loaded."""
        return sum(weight.nbytes for weight in self._model.parameters())

    def fingerprint(self, block_size: int) -> str:
        return model_fingerprint(self._model, block_size, self._beside)

    def pack(self) -> None:
        """Lays the weights out for speed on CPU. Fingerprint and reference logits must have been taken before."""
        if _is_quantised(self._model):
            return  # its layers hold what only they understand
        if self.device.type == "cpu" and self.dtype == torch.bfloat16:
            _leave_checkpoint(self._model)
        quantised, self._quantised = self._quantised, {}
        if self.kernels is not None and NativeDecoder.fits(self._model, self.kv_shape, self.attention):
            self._packed = NativeDecoder(self.kernels, self._model, self.kv_shape, self.attention, quantised)
            logger.info("model packed for kernels of its own", extra={"layers": self.num_layers})
            return
        if self.kernels is None and PackedLlama.fits(self._model):
            self._packed = PackedLlama(self._model)
            logger.info("Llama layers packed for oneDNN", extra={"layers": self.num_layers})
            return
        packed = pack_linears(
            self._model,
            lambda: self.reference_logits(torch.zeros(2, dtype=torch.long, device=self.device)),
            self.kernels,
            quantised,
        )
        if packed:
            logger.info("linear layers packed", extra={"layers": packed})

    @torch.inference_mode()
    def _quantise(self, quantize: Quantize) -> dict[nn.Linear, int]:
        """Rounds the weights. Raises StartupError where there are none, or nothing could multiply by them."""
        refused = f"model {self.name} cannot be served with quantize {quantize}"
        if _is_quantised(self._model):
            raise StartupError(f"{refused}: its checkpoint is quantised already")
        if self.dtype != torch.bfloat16 or self.kernels is None:
            kind = str(self.dtype).removeprefix("torch.")
            raise StartupError(
                f"{refused}: that needs dtype bfloat16 and kernels of its own for a CPU (native auto), "
                f"not {kind} on {self.device.type}" + (" without them" if self.kernels is None else "")
            )
        head = self._model.get_output_embeddings()  # type: ignore[no-untyped-call]
        bits = 8 if quantize == "int8" else 4
        quantised = {}
        for name, module in self._model.named_modules():
            if type(module) is not nn.Linear or module.weight.dtype != torch.bfloat16:
                continue
            if head is not None and module.weight is head.weight:
                continue
            try:
                module.weight.copy_(QuantisedWeight.of(module.weight, bits).dequantised())
            except ValueError as error:
                raise StartupError(f"{refused}: {name}: {error}") from error
            quantised[module] = bits
        if not quantised:
            raise StartupError(f"{refused}: it has no linear layers but its head")
        share = sum(layer.weight.numel() for layer in quantised) / self._model.num_parameters()
        logger.info("weights quantised", extra={"to": quantize, "layers": len(quantised), "share": round(share, 3)})
        return quantised


def _is_quantised(model: PreTrainedModel) -> bool:
    """Whether its checkpoint came with weights of fewer bits, which its own layers hold in ways of their own."""
    return getattr(model.config, "quantization_config", None) is not None


def _leave_checkpoint(model: PreTrainedModel) -> None:
    """Copies all weights but those of linear layers, which are to be packed: one tensor in it would keep the whole
    mapped file in memory."""
    linear = {id(module.weight) for module in model.modules() if type(module) is nn.Linear}
    for tensor in chain(model.parameters(), model.buffers()):
        if id(tensor) not in linear:
            tensor.data = tensor.data.clone()


def _probe_attention(model: PreTrainedModel, name: str) -> tuple[KVShape, list[LayerAttention]]:
    """Runs two tokens through an attention function that only looks, to learn what its layers' KV is, and how they
    attend.

    Leaves the paged attention function installed. Raises StartupError if the model does not let it be.
    """
    seen: dict[int, tuple[int, int, int]] = {}
    attention: dict[int, LayerAttention] = {}

    def probe(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        layer: int = module.layer_idx  # type: ignore[assignment]
        seen[layer] = (key.shape[1], key.shape[3], value.shape[3])
        scale = kwargs.get("scaling")
        attention[layer] = LayerAttention(
            query.shape[1],
            query.shape[-1] ** -0.5 if scale is None else float(scale),
            kwargs.get("sliding_window"),
            kwargs.get("softcap"),
        )
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None

    AttentionInterface.register(_PROBE_NAME, probe)
    try:
        model.set_attn_implementation(_PROBE_NAME)
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=model.device), use_cache=False)
        model.set_attn_implementation(ATTENTION_NAME)
    except Exception as error:
        # Whatever remote or unsuitable modelling code raises, the verdict is the same.
        raise StartupError(f"model {name} cannot be served: {_first_line(error)}") from error
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    if len(seen) < num_layers or not seen:
        raise StartupError(
            f"model {name} cannot be served: {len(seen)} of its {num_layers} layers use attention over a KV cache"
        )
    heads, key_dims, value_dims = zip(*seen.values(), strict=True)
    if len(set(heads)) > 1 or len(set(key_dims)) > 1 or len(set(value_dims)) > 1:
        raise StartupError(f"model {name} cannot be served: its layers differ in KV heads or head sizes")
    shape = KVShape(max(seen) + 1, heads[0], key_dims[0], value_dims[0])
    return shape, [attention[layer] for layer in sorted(attention)]


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    eos = model.generation_config.eos_token_id if model.generation_config is not None else model.config.eos_token_id
    if eos is None:
        return frozenset()
    return frozenset(eos) if isinstance(eos, list) else frozenset([eos])


def _tensor(numbers: array[int] | NDArray[np.int64] | Tensor) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.asarray(numbers))


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
