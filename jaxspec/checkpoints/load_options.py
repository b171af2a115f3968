"""LoadOptions: what jaxspec.load, LLM and the commands load a model with."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate

from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxspec.checkpoints.built_in import BUILT_IN_MODEL
from jaxspec.checkpoints.kv_scale_file import KVScaleFile
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.decoding.drafters import Drafter
from jaxspec.models.decoder import Decoder


@dataclasses.dataclass(frozen=True, eq=False)
class LoadOptions:
    """A target, its drafter, and how they are loaded.

    Attributes:
      model: a Hugging Face model directory or hub id; the built-in model by default.
      drafter: ``none``, ``ngram``, ``suffix``, ``mtp`` (the model's own layers for multi-token
        prediction; ``mtp:before``, ``mtp:after``, ``mtp:before-after`` and
        ``mtp:after-before`` replace the family's choice of hidden states (see MtpStates.name), and
        a number, as in ``mtp:1`` and ``mtp:after:1``, uses that many layers instead of all), or a
        directory or hub id of an EAGLE head, of MTP layers, of a block head (DFlash, DSpark) or of
        a draft model;
        ``ngram+`` and such a directory or id: n-gram lookup in rows where it finds a long match,
        the head or model in the others (see drafters.MixedDrafter); ``suffix+`` likewise;
        ``suffix:65536`` and ``suffix:65536+``: so many tokens of past outputs are looked up, too
        (see drafters.SuffixDrafter); of an LLM also ``text:`` and a model with any tokenizer, or
        the URL of a server on this machine (see llm.text_drafts); ``auto``: see choose_drafter.
        A Drafter object is used as given.
      speculation: the draft tree and the acceptance rule; by default
        config.speculation.default_speculation.
      dtype: ``float32`` or ``bfloat16``, by name or as jax.numpy has it; by default float32 on
        CPU and bfloat16 elsewhere.
      mesh: as made by make_mesh; None for the default device.
      shard_drafter: split the drafter's weights over the mesh too, instead of repeating them.
      drafter_bits: 4: the drafter's matrices as 4-bit integers, with a scale and a zero for up to
        64 inputs of each output. 8: as 8-bit integers, too, with a scale for each output, which
        halves what a draft step of up to 48 rows reads. A head that reads the target's LM head gets
        a copy of it in as many bits. None: only as loaded. The text does not depend on it.
      kv_dtype: ``fp8``: keys and values of target and drafter as 8-bit floats (e4m3), of which half
        as many bytes as of bfloat16 are kept and read; None: in the dtype of the weights. The
        text depends on it, and is the same with and without speculation.
      kv_scales: with ``fp8``, scales for its keys and values, or a file of them (see
        ``jaxspec kv-scales``); None: scales of 1.
      kernels: operations that run as kernels: ``auto`` (all on a Hopper GPU, attention on a TPU
        v5e or v6e, none elsewhere), ``all``, ``none``, or a comma list of names.
      stage_layers: layers of each stage of a mesh with stages; None: so many that all take about as
        long for what they read in a round, the last one's drafting and LM head included.
      drafter_mesh: devices for the drafter, the embeddings and the LM head alone: a last stage
        without layers.
      target: the model's weights, if another engine on the same devices has loaded them: both use
        the same memory.
    """

    model: str | Path = BUILT_IN_MODEL
    drafter: str | Path | Drafter = "auto"
    _: dataclasses.KW_ONLY
    speculation: SpeculationConfig | None = None
    dtype: DTypeLike | None = None
    mesh: Mesh | None = None
    shard_drafter: bool = False
    drafter_bits: int | None = None
    kv_dtype: str | None = None
    kv_scales: str | Path | KVScaleFile | None = None
    kernels: str = "auto"
    stage_layers: Sequence[int] | None = None
    drafter_mesh: Mesh | None = None
    target: Decoder | None = None


def takes_fields_of[**Fields, Options, Result](
    options: Callable[Fields, Options],
) -> Callable[[Callable[[Options], Result]], Callable[Fields, Result]]:
    """A decorator of a function of options: it then takes their fields, by name."""

    def decorate(function: Callable[[Options], Result]) -> Callable[Fields, Result]:
        @functools.wraps(function)
        def call(*args: Fields.args, **keywords: Fields.kwargs) -> Result:
            return function(options(*args, **keywords))

        return _with_signature(call, list(inspect.signature(options).parameters.values()))

    return decorate


def method_takes_fields_of[**Fields, Options, Self, Result](
    options: Callable[Fields, Options],
) -> Callable[[Callable[[Self, Options], Result]], Callable[Concatenate[Self, Fields], Result]]:
    """The decorator takes_fields_of for a method."""

    def decorate(
        method: Callable[[Self, Options], Result],
    ) -> Callable[Concatenate[Self, Fields], Result]:
        @functools.wraps(method)
        def call(self: Self, *args: Fields.args, **keywords: Fields.kwargs) -> Result:
            return method(self, options(*args, **keywords))

        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return _with_signature(call, [first, *inspect.signature(options).parameters.values()])

    return decorate


def _with_signature[F: Callable[..., Any]](function: F, parameters: list[inspect.Parameter]) -> F:
    """The function, as help() and inspect show it."""
    setattr(function, "__signature__", inspect.Signature(parameters))  # noqa: B010
    return function
