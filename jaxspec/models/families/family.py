"""What a model family is: how its ``config.json`` becomes a ModelConfig, and what families share.

A key that transformers' config class of the family declares, and that is not read here, is an error
unless it has the class's own default; so is a value that the decoder cannot honour. Keys that the
class does not declare change nothing there either: they are ignored, with a warning that lists
them. Absent keys take transformers' defaults.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxspec.config.checks import Problems
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.config.mtp import AFTER, MtpConfig, MtpLayout, MtpStates
from jaxspec.config.rope import LongRopeScaling, RopeConfig
from jaxspec.models.json import keys as hf_keys
from jaxspec.models.json.declared import declared_keys
from jaxspec.models.json.values import (
    check_flag,
    is_integer,
    is_positive_integer,
    is_positive_number,
    naming,
    shown,
    shown_name,
)

MOST_LAYERS = 1000  # a mistyped number of layers must not fill the host's memory
ROPES = frozenset({"rope_parameters", "rope_scaling"})
Keys = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A ``model_type``.

    Attributes:
      architecture: its class name in transformers.
      read: from all keys of hf_keys.COMMON_DEFAULTS and ``defaults``, the absent ones filled in, to
        a ModelConfig. Raises ValueError for a model that the decoder would not compute exactly.
      keys: that it reads, or that have no effect in it, besides hf_keys.COMMON_KEYS and those of
        ``defaults``.
      defaults: transformers' values of absent keys, where they are not hf_keys.COMMON_DEFAULTS.
      fixed: keys that must have one of these values, besides hf_keys.FIXED_VALUES or in place of
        them.
      more_keys: from a config to further keys that have no effect in it.
      rewrite: from the keys of a file, once they are checked, to the same in the words of ``read``.
      class_of: the model_type whose config class transformers reads such a file with; None: it has
        one of the family's own.
      renames: of tensors, whose names differ from those of the layers in the ModelConfig: each is
        an expression and what it is replaced by, one after the other.
      left_out: expressions of names of tensors that the model does not need, such as MTP layers
        that are not read. ``{layers}`` in them is the number of the model's layers.
      published_as: the name of the class in published files, where it is another.
      writes: the keys that its written configs have besides those that all families share. None:
        configs of this family are not written.
    """

    architecture: str
    read: Callable[[Keys], ModelConfig]
    keys: frozenset[str] = frozenset()
    defaults: Keys = dataclasses.field(default_factory=dict)
    fixed: hf_keys.Allowed = dataclasses.field(default_factory=dict)
    more_keys: Callable[[Keys], frozenset[str]] | None = None
    rewrite: Callable[[Keys], Keys] = dict
    class_of: str | None = None
    renames: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    published_as: str | None = None
    writes: frozenset[str] | None = None

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the classes whose files are read: the family's, and that without an LM head."""
        without_head = self.architecture.replace("ForCausalLM", "Model")
        return self.architecture, without_head, *filter(None, [self.published_as])

    def text_family(self, raw: Keys) -> "Family":
        """The family of the text model, which is this one."""
        return self

    def inside(self, raw: Keys) -> str | None:
        """The key of the object that has the text model's config. None: it is the whole file."""
        return None

    def model(self, raw: Keys) -> ModelConfig:
        """The ModelConfig of the contents of ``config.json``.

        Raises ValueError for a model that the decoder would not compute exactly.
        """
        known = self.keys | (self.defaults.keys() - self.fixed.keys())
        if self.more_keys is not None:
            known |= self.more_keys(raw)
        fixed = {**hf_keys.FIXED_VALUES, **self.fixed}
        fixed = {key: values for key, values in fixed.items() if key not in known}
        problems, types = Problems(), Problems()
        with problems.caught():
            model_type = self.class_of or raw["model_type"]
            check_config_keys(raw, hf_keys.COMMON_KEYS | known, fixed, model_type)
        with problems.caught():
            check_code(raw.get("auto_map"), self.architectures)
        with problems.caught():
            raw = self.rewrite(raw)
        with problems.caught():
            _check_rope_keys(raw)
        hf = self._with_defaults(raw, types)
        with problems.caught():
            types.raise_all()
        if types:  # such values are not read any further
            problems.raise_all()
        with problems.caught():
            stop_token_ids(hf["eos_token_id"], hf["vocab_size"])
        with problems.caught():
            check_multiple(hf, "num_attention_heads", "num_key_value_heads")
        found = self._read(hf, problems)
        problems.raise_all()
        assert found is not None  # else there was a problem
        return found

    def _read(self, hf: Keys, problems: Problems) -> ModelConfig | None:
        """The model, or None, and each problem of its keys.

        ``read`` stops at the first one. So what it names gets its default value, and the rest is
        read. A problem that then names such a key may be the default's, and is left out.
        """
        defaults = {**hf_keys.COMMON_DEFAULTS, **self.defaults}
        model, replaced = None, set()
        while model is None:
            try:
                model = self.read({**hf, **{key: defaults[key] for key in replaced}})
            except ValueError as error:
                message = str(error)
                named = {key for key in hf if re.search(rf"\b{re.escape(key)}\b", message)}
                if "rope" in message:  # inside an object
                    named |= hf.keys() & ROPES
                if replaced and (replaced & named or not named):
                    break
                problems.add(message)
                replaced |= {key for key in named if hf[key] != defaults[key]}
                if not replaced & named:
                    break
        return None if problems else model

    def _with_defaults(self, raw: Keys, problems: Problems) -> dict[str, Any]:
        """The keys that are read, the absent ones filled in. ``problems`` gets those of values of a
        type that they cannot have."""
        defaults = {**hf_keys.COMMON_DEFAULTS, **self.defaults}
        hf = {key: raw.get(key, default) for key, default in defaults.items()}
        flags = (hf_keys.FLAGS - hf_keys.NEVER_NULL) & hf.keys()
        hf |= {key: defaults[key] for key in flags if hf[key] is None}
        for key, value in hf.items():
            if value is None and (defaults[key] is None or key in hf_keys.OPTIONAL):
                continue
            if key in hf_keys.SIZES and not is_positive_integer(value):
                problems.add(f"{key} must be a positive integer, got {shown(value)}")
            if key in hf_keys.NUMBERS and not is_positive_number(value):
                problems.add(f"{key} must be a number above 0, got {shown(value)}")
            if key in hf_keys.FLAGS:
                with problems.caught():
                    check_flag(key, value)
        count = hf["num_hidden_layers"]
        if is_positive_integer(count) and count > MOST_LAYERS:
            problems.add(f"num_hidden_layers {count} is more than {MOST_LAYERS}")
        return hf


def sizes(
    vocab: int, hidden: int, units: int, layers: int, heads: int, kv_heads: int, positions: int
) -> dict[str, Any]:
    """Defaults of the keys that say how large a model is."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": units,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


def check_code(auto_map: Any, architectures: tuple[str, ...]) -> None:
    """Code that comes with a checkpoint is not run. Raises ValueError if it is of a class that is
    none of ``architectures``, which may compute something else."""
    if auto_map is None:
        return
    if not isinstance(auto_map, dict):
        raise ValueError(f"auto_map must be an object, got {shown(auto_map)}")
    name = auto_map.get("AutoModelForCausalLM")
    if name is not None and str(name).rpartition(".")[2] not in architectures:
        raise ValueError(
            f"auto_map: AutoModelForCausalLM = {shown(name)} is not supported, only a class "
            f"{architectures[0]}: code of a checkpoint is not run. Remove auto_map if that "
            "code computes what the family does"
        )


def _check_rope_keys(raw: Keys) -> None:
    """Raise ValueError for a value beside the rope parameters that is another one inside them,
    where transformers reads it."""
    for where in ("rope_scaling", "rope_parameters"):
        inside = raw.get(where)
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in raw and isinstance(inside, dict) and inside.get(key) is not None:
                check_agrees(raw, key, inside[key], f"that of {where}")


def check_config_keys(
    raw: Keys, known: frozenset[str], fixed: hf_keys.Allowed, model_type: str
) -> None:
    """Warn of the keys of a config.json that nobody reads.

    Raises ValueError that lists all keys that transformers reads and jaxspec does not, and all
    values that are not among those a key is fixed to.
    """
    declared = declared_keys(model_type)
    problems, ignored = [], []
    for key, value in raw.items():
        if key in fixed:
            if value not in fixed[key]:
                problems.append(_not_supported(key, value, fixed))
        elif key in known or hf_keys.is_bookkeeping(key):
            continue
        elif declared is None or (key in declared and value != declared[key]):
            problems.append(_unknown(key, value))
        elif key not in declared:
            ignored.append(shown_name(key))
    if problems:
        raise ValueError("; ".join(problems))
    if ignored:
        warnings.warn(
            f"config.json has keys that a {model_type} model does not read: {', '.join(ignored)}",
            stacklevel=2,
        )


def _not_supported(key: str, value: Any, fixed: hf_keys.Allowed) -> str:
    return f"{key} = {shown(value)} is not supported, only {fixed[key][-1]!r}"


def _unknown(key: str, value: Any) -> str:
    return (
        f"unknown key {shown(key)} (= {shown(value)}); it may change what the model computes. "
        "Remove it if it does not"
    )


def check_keys(raw: Keys, known: frozenset[str], fixed: hf_keys.Allowed, inside: str = "") -> None:
    """Raise ValueError unless each key is known, or has one of the values it is fixed to.

    ``inside`` names the object that has the keys, if it is not the whole file.
    """
    where, problems = f"{inside}: " if inside else "", Problems()
    for key, value in raw.items():
        if key in fixed and value not in fixed[key]:
            problems.add(where + _not_supported(key, value, fixed))
        if key not in known and key not in fixed:
            problems.add(where + _unknown(key, value))
    problems.raise_all()


def model_of(hf: Keys, layers: Iterable[LayerConfig], *, norm_offset: int = 0) -> ModelConfig:
    """A model of these layers, with the sizes that all families read alike.

    Sequences are no longer than every layer's rope allows.
    """
    layers = tuple(layers)
    mixers = (mixer for layer in layers for mixer in layer.mixers)
    scalings = (rope.scaling for mixer in mixers for rope in mixer.ropes)
    limits = (scaling.max_position for scaling in scalings if isinstance(scaling, LongRopeScaling))
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        rms_norm_eps=hf["rms_norm_eps"],
        max_position=min([hf["max_position_embeddings"], *filter(None, limits)]),
        layers=layers,
        tie_word_embeddings=hf["tie_word_embeddings"],
        stop_token_ids=stop_token_ids(hf["eos_token_id"], hf["vocab_size"]),
        norm_offset=norm_offset,
        mtp=mtp_of(hf, "deepseek", AFTER),
    )


def mtp_of(
    hf: Keys, layout: MtpLayout, states: MtpStates, *, key: str | None = None
) -> MtpConfig | None:
    """The MTP layers that a checkpoint has beside its model. Those of families that do not say
    otherwise are as in DeepSeek-V3's checkpoints. ``key`` has their number; None: DeepSeek's key.
    ``states``: what they read, unless the config has ``mtp_states``.

    Raises ValueError for what is no number of layers, and for unknown states.
    """
    name = "num_nextn_predict_layers" if hf["num_mtp_layers"] is None else "num_mtp_layers"
    name = key or name  # transformers writes the latter
    count = hf[name]
    if not is_integer(count) or count < 0:
        raise ValueError(f"{name} must be a number of layers, got {shown(count)}")
    if hf["mtp_states"] is not None:
        with naming("mtp_states"):
            states = MtpStates.named(hf["mtp_states"])
    return MtpConfig(layout, count, states) if count else None


def check_agrees(hf: Keys, name: str, value: Any, others: str) -> None:
    """Raise ValueError if a key says in another way what ``others`` say, and says something else
    than their ``value``. It may be absent."""
    if hf[name] not in (None, value):
        raise ValueError(
            f"{name} = {shown(hf[name])} contradicts {others} (= {shown(value)}); correct one of "
            f"them, or remove {name}"
        )


def attention_of(hf: Keys, rope: RopeConfig, window: int | None = None) -> AttentionConfig:
    """Attention with the heads and biases that most families read alike, without norms."""
    heads, bias = hf["num_attention_heads"], hf["attention_bias"]
    kv_heads = hf["num_key_value_heads"] or heads
    check_multiple(hf, "num_attention_heads", "num_key_value_heads")
    return AttentionConfig(heads, kv_heads, rope, window, qkv_bias=bias, o_bias=bias)


def check_multiple(hf: Keys, name: str, divisor: str) -> None:
    """Raise ValueError unless the value of a key is a multiple of another's, if that has one."""
    if hf[divisor] and hf[name] % hf[divisor]:
        raise ValueError(f"{name} ({hf[name]}) must be a multiple of {divisor} ({hf[divisor]})")


def dense_of(hf: Keys) -> DenseConfig:
    """The MLP that most families read alike."""
    return DenseConfig(hf["intermediate_size"], hf["mlp_bias"])


def head_dim(hf: Keys) -> int:
    """Width of a head. Raises ValueError if none is given and heads do not divide hidden_size."""
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    if hf["head_dim"] is None and hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hf["head_dim"] or hidden // heads


def stop_token_ids(eos: Any, vocab_size: int) -> tuple[int, ...]:
    """The ids of an integer, a list of them, or None. Raises ValueError for anything else."""
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(map(is_integer, ids)):
        raise ValueError(f"eos_token_id must be an integer or a list of them, got {shown(eos)}")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"eos_token_id {shown(token)} is no id of a vocabulary of {vocab_size} tokens"
            )
    return tuple(dict.fromkeys(ids))
